"""Budget of many runs: steps that several of them share are counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flows.execution.plan import PlannedStep, plan
from flows.pipeline.algorithm import unread_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.external import HubUnreachableError
from flows.pipeline.step import Output, Step
from flows.planning.estimate import StepEstimate, estimate, wall_seconds
from stages.contract.digests import sha256_of
from stages.contract.request import key_fields


@dataclass(frozen=True)
class _Identity:
    """Stands for the content of an output that is not there yet."""

    digest: str


@dataclass(frozen=True)
class BudgetStep:
    """One step, as often as it is asked for.

    Attributes:
        runs: Names of the runs that ask for it.
        cost: What it costs once.
        upstream: Identities of the steps that it reads from.
    """

    cost: StepEstimate
    upstream: Sequence[str]
    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Budget:
    """Cost of several runs.

    Attributes:
        steps: Steps by an identity that equal steps of all runs share.
        of_run: Identities of each run's steps.
        hub_asked: Whether the store was looked into for runs with inputs of the hub; where the hub
            did not answer, they count as not computed.
    """

    steps: Mapping[str, BudgetStep]
    of_run: Mapping[str, Sequence[str]]
    hub_asked: bool

    def tokens(self, identities: Iterable[str]) -> float:
        """Tokens of steps, each once."""
        return sum(self.steps[each].cost.cost.tokens for each in set(identities))

    def shared(self, run: str) -> list[str]:
        """Identities of a run's steps that another run asks for as well."""
        return [each for each in self.of_run[run] if len(self.steps[each].runs) > 1]

    def todo(self) -> dict[str, BudgetStep]:
        """Steps that the store lacks."""
        return {name: each for name, each in self.steps.items() if not each.cost.cached}

    def seconds(self, parallel: int) -> float:
        """Wall time of the steps that the store lacks, ``parallel`` at a time."""
        todo = self.todo()
        lasting = {name: each.cost.cost.seconds or 0.0 for name, each in todo.items()}
        upstream = {name: each.upstream for name, each in todo.items()}
        return wall_seconds(lasting, upstream, parallel)

    def gpu_hours(self) -> float:
        """GPU-hours of the steps that the store lacks."""
        return sum(each.cost.gpu_hours for each in self.todo().values())

    def disk(self) -> float:
        """Bytes that the steps still to be computed will keep."""
        return sum(each.cost.cost.disk for each in self.todo().values())

    def warnings(self) -> list[str]:
        """Warnings of the steps that the store lacks, each once."""
        found = [warning for each in self.todo().values() for warning in each.cost.warnings]
        return list(dict.fromkeys(found))


def budget(configs: Sequence[RunConfig]) -> Budget:
    """Estimates runs together, without starting anything.

    Args:
        configs: Configurations of the runs, each with a name of its own.

    Raises:
        UserError: A setting or a local input is wrong.
    """
    steps: dict[str, BudgetStep] = {}
    of_run: dict[str, Sequence[str]] = {}
    hub_answers = True
    for config in configs:
        own = unread_steps(config)
        planned = None
        if hub_answers:
            try:
                planned = plan(config)
            except HubUnreachableError:
                # That takes a while to find out: once is enough.
                hub_answers = False
        lines = planned or [PlannedStep(each.name, each.stage, "run", "", None) for each in own]
        costs = {each.step: each for each in estimate(config, lines, own).steps}
        identities = _identities(own)
        of_run[config.name] = list(identities.values())
        for step in own:
            upstream = [identities[each] for each in step.upstream()]
            known = BudgetStep(costs[step.name], upstream)
            steps.setdefault(identities[step.name], known).runs.append(config.name)
    return Budget(steps, of_run, hub_answers)


def _identities(steps: Sequence[Step]) -> dict[str, str]:
    """An identity for each step by its name: what its key would be, were its inputs there."""
    found: dict[str, str] = {}
    for step in steps:
        inputs = {
            name: [
                _Identity(f"{found[each.step]}/{each.path}") if isinstance(each, Output) else each
                for each in group
            ]
            for name, group in step.inputs.items()
        }
        found[step.name] = sha256_of(key_fields(step.params, step.seed, inputs))
    return found
