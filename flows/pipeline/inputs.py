"""Inputs of a run and its suites from outside the store: policy, prompts, oracles."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.pipeline.config import Inputs, RunConfig
from flows.pipeline.external import Externals, RepoType, resolve
from flows.pipeline.paths import anchored_input
from stages.contract.digests import sha256_of
from stages.contract.errors import UserError
from stages.contract.request import HubInput, Input
from stages.store.base import Store
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry

ORACLE_INPUTS = {"model": "oracle_model", "code": "oracle_code"}
"""Field of `inputs` for each input of the score stage that comes from outside."""


def resolve_model(location: str, store: Store) -> Input:
    """Turns a registered model, a checkpoint folder or a hub id into an input with an identity.

    A registered model is ``name``, ``name@alias`` or ``name:version``. A folder and a hub id have
    a slash. See also :func:`resolve`.

    Raises:
        UserError: The model is unknown.
        HubUnreachableError: The hub cannot be asked for the revision.
    """
    if "/" in location:
        return resolve(anchored_input(location, Path.cwd()), "model")
    version, _ = ModelRegistry(store).resolve(location)
    return version.checkpoint


Find = Callable[[str, RepoType], Input]
"""Makes an input of its location: :func:`resolve`, or :func:`unread`."""


def every_input(config: RunConfig, find: Find) -> dict[str, Externals]:
    """Inputs of a run and of its suites, by the names of :meth:`RunConfig.parts`."""
    return {name: _inputs_of(part.inputs, find) for name, part in config.parts().items()}


def _inputs_of(inputs: Inputs, find: Find) -> Externals:
    # The first to be looked for: it tells soonest whether the hub answers.
    named: dict[str, Any] = {"policy": None} | dict(inputs)
    external = {}
    for name, location in named.items():
        locations = [location] if isinstance(location, str) else location or ()
        external[name] = [find(place, _repo_type(name)) for place in locations]
    return external


def _repo_type(name: str) -> RepoType:
    return "model" if name in ("policy", "oracle_model") else "dataset"


def at_commits(config: RunConfig) -> RunConfig:
    """The configuration with a commit for each hub id: a resumed run has the same weights."""
    values = config.to_values()
    for section in (values["inputs"], *values["suites"].values()):
        for name in Inputs.model_fields.keys() & section:
            section[name] = _at_commit(section[name], _repo_type(name))
    return type(config).model_validate(values)


def _at_commit(place: Any, repo_type: RepoType) -> Any:
    if isinstance(place, list):
        return [_at_commit(one, repo_type) for one in place]
    source = place and resolve(place, repo_type)
    return f"{source.repo}@{source.revision}" if isinstance(source, HubInput) else place


def resolve_inputs(config: RunConfig) -> dict[str, Externals]:
    """Finds all that comes into a run from outside; UserError if some is missing or not named."""
    inputs = config.inputs
    if not inputs.prompts:
        raise UserError("inputs.prompts names no prompts", "name a file or a hub data set")
    if inputs.policy is None and inputs.warm_start is None:
        raise UserError(
            "the run has no policy to start from",
            "set inputs.policy (a checkpoint), or inputs.warm_start (data for a supervised start)",
        )
    _require_own_code(config)
    for suite, part in config.parts().items():
        _require_oracle_inputs(part, suite)
    return every_input(config, resolve)


@dataclass(frozen=True)
class ComparedModels:
    """Two models to compare, and the suite whose prompts they answer; None for the defaults."""

    policy: str
    base: str | None = None
    suite: str | None = None


def resolve_compared(config: RunConfig, models: ComparedModels) -> tuple[RunConfig, Externals]:
    """The configuration of an evaluation of two models, and its inputs, ``base`` among them.

    Raises:
        UserError: A model, the suite or an input is missing or not named.
        HubUnreachableError: The hub cannot be asked for a revision.
    """
    suite = models.suite
    base = models.base
    if config.inputs.warm_start is None:
        base = base or config.inputs.policy
    if base is None:
        raise UserError(
            "no base to compare with: the configuration warm-starts its own",
            "name one as the base, for example a first version (`quickstart:1`)",
        )
    if suite is None:
        external = resolve_inputs(config)[""]
    else:
        config = config.for_suite(suite)
        if not config.inputs.test_prompts:
            raise UserError(
                f"the suite {suite} has no prompts: it scores samples of a run once more",
                f"name some with --set suites.{suite}.prompts=FILE",
            )
        # A configuration of suites may have none of a run's own inputs.
        _require_oracle_inputs(config, suite)
        external = _inputs_of(config.inputs, resolve)
    store = open_store(config.store, create=True)
    external["policy"] = [resolve_model(models.policy, store)]
    external["base"] = [resolve_model(base, store)]
    name = f"{config.name}-evaluation-{sha256_of(vars(models))[:8]}"
    # No other suite is scored.
    return config.model_copy(update={"name": name, "suites": {}}), external


def _require_own_code(config: RunConfig) -> None:
    for name, setting, value in (
        ("objective_code", "train.objective", config.train.objective),
        ("strategy_code", "pair.strategy", config.pair.strategy),
    ):
        if value == "python" and getattr(config.inputs, name) is None:
            raise UserError(
                f"{setting} is 'python', and inputs.{name} names no file",
                "name the Python file; docs/research.md tells what its function takes",
            )


def _require_oracle_inputs(config: RunConfig, suite: str) -> None:
    """Refuses a run, or a suite, that does not name the inputs which its oracle needs."""
    section = f"suites.{suite}" if suite and config.suites[suite].score else "inputs"
    for needed, oracle in config.score.needs.items():
        name = ORACLE_INPUTS[needed]
        if getattr(config.inputs, name) is None:
            raise UserError(
                f"the oracle {oracle} needs {section}.{name}",
                "name it, or choose another oracle; docs/oracles.md tells what each needs",
            )
