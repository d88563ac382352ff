"""Budget of the paper's cells: steps that several runs share are counted once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.study import (
    Row,
    choose,
    finished,
    identities,
    mean_rewards,
    reported_runs,
    tuning_runs,
)
from flows.execution.plan import plan
from flows.pipeline.algorithm import resolve_run, unread_steps
from flows.pipeline.external import HubUnreachableError
from flows.pipeline.presets import store_of
from flows.planning.estimate import RunEstimate, StepEstimate, estimate, measured_rates
from flows.planning.show import cost_lines
from stages.store.opening import open_store


@dataclass(frozen=True)
class Budget:
    """Runs of cells, and the cost of their different steps.

    Attributes:
        steps: Number of steps of all runs.
        hub_asked: False if the hub did not answer, so that the store's share is unknown.
    """

    runs: Sequence[str]
    steps: int
    cost: RunEstimate
    hub_asked: bool

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document: tokens, time and GPU-hours of what the store lacks."""
        lacking = self.cost.lacking
        return {
            "runs": self.runs,
            "steps": self.steps,
            "different_steps": len(self.cost.steps),
            "steps_to_compute": len(lacking),
            "tokens": sum(step.work.tokens for step in lacking),
            "seconds": self.cost.seconds,
            "gpu_hours": sum(step.gpu_hours for step in lacking),
            "hub_asked": self.hub_asked,
            "warnings": self.cost.warnings,
        }

    def lines(self) -> list[str]:
        """The budget in a few lines."""
        different = len(self.cost.steps)
        lines = [
            f"{len(self.runs)} runs: {self.steps} steps, {different} of them different, "
            f"{different - len(self.cost.lacking)} in the store",
            *cost_lines(self.cost),
        ]
        if not self.hub_asked:
            lines.append("the hub does not answer: what the store has of its runs is unknown")
        return lines + [f"warning: {warning}" for warning in self.cost.warnings]


def budget(
    rows: Sequence[Row],
    overrides: Mapping[str, Any],
    most_seeds: int | None = None,
    parallel_runs: int = 1,
) -> Budget:
    """Estimates the runs of cells; a coefficient without a finished tuning run is its first value.

    Arguments are as in :func:`experiments.study.tuning_runs`; parallel runs share the time
    evenly.
    """
    tuned = finished(tuning_runs(rows, overrides))
    first = {row: row.coefficients()[0] for row in rows if row.grid}
    chosen = {**first, **choose(tuned, mean_rewards(tuned))}
    runs = tuning_runs(rows, overrides, most_seeds)
    runs += reported_runs(rows, overrides, chosen, most_seeds)
    configs = {run.name: run.cell.config for run in runs}
    # All cells have one store.
    rates = measured_rates(open_store(store_of(overrides), create=True))
    different: dict[str, StepEstimate] = {}
    hub_asked = True
    num_steps = 0
    for config in configs.values():
        planned = []
        try:
            planned = plan(resolve_run(config)) if hub_asked else []
        except HubUnreachableError:
            # That takes a while to find out: once is enough.
            hub_asked = False
        steps = unread_steps(config)
        costs = estimate(config, steps, planned, rates).steps
        different |= zip(identities(steps), costs, strict=True)
        num_steps += len(steps)
    seconds = sum(step.seconds or 0.0 for step in different.values() if not step.cached)
    cost = RunEstimate(list(different.values()), seconds / parallel_runs)
    return Budget(list(configs), num_steps, cost, hub_asked)
