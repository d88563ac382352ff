"""Inputs of a run and its suites from outside the store: policy, prompts, oracles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flows.pipeline.config import Inputs, RunConfig, Suite
from flows.pipeline.external import Externals, RepoType, resolve
from stages.contract.digests import sha256_of
from stages.contract.errors import UserError
from stages.contract.request import Input
from stages.score.params import ScoreParams
from stages.store.base import Store
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry

ORACLE_INPUTS = {"model": "oracle_model", "code": "oracle_code"}
"""Field of `inputs` for each input of the score stage that comes from outside."""
SUITE_INPUTS = (*ORACLE_INPUTS.values(), "prompts", "test_prompts")
"""Fields of `inputs` that a suite has, too."""


def resolve_model(location: str, store: Store) -> Input:
    """Turns a registered model, a checkpoint folder or a hub id into an input with an identity.

    A registered model is ``name``, ``name@alias`` or ``name:version``. A folder and a hub id have
    a slash. See also :func:`resolve`.

    Raises:
        UserError: The model is unknown.
        HubUnreachableError: The hub cannot be asked for the revision.
    """
    if "/" in location:
        return resolve(location, "model")
    version, _ = ModelRegistry(store).resolve(location)
    return version.checkpoint


def suite_input(suite: str | None, name: str) -> str:
    """Name of a suite's input among the run's inputs; without a suite, the input's own."""
    return name if suite is None else f"suites.{suite}.{name}"


Find = Callable[[str, RepoType], Input]
"""Makes an input of its location: :func:`resolve`, or :func:`unread`."""


def every_input(config: RunConfig, find: Find) -> Externals:
    """Inputs of a run and of its suites, by :func:`suite_input`."""
    inputs = {}
    for suite in (None, *config.suites):
        for name, group in _inputs_of(config, suite, find).items():
            inputs[suite_input(suite, name)] = group
    return inputs


def _inputs_of(config: RunConfig, suite: str | None, find: Find) -> Externals:
    """Inputs of a run, or of a suite under the names that a run's own have."""
    named: dict[str, Any]
    if suite is None:
        # The first to be looked for: it tells soonest whether the hub answers.
        named = {"policy": None} | dict(config.inputs)
    else:
        _, oracle, _ = _oracle_of(config, suite)
        named = {name: getattr(oracle, name) for name in ORACLE_INPUTS.values()}
        named |= {"prompts": (), "test_prompts": config.suites[suite].prompts}
    inputs = {}
    for name, location in named.items():
        repo_type: RepoType = "model" if name in ("policy", "oracle_model") else "dataset"
        locations = [location] if isinstance(location, str) else location or ()
        inputs[name] = [find(place, repo_type) for place in locations]
    return inputs


def resolve_inputs(config: RunConfig) -> Externals:
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
    for suite in (None, *config.suites):
        require_oracle_inputs(config, suite)
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
        external = resolve_inputs(config)
    else:
        config = config.for_suite(suite)
        if not config.suites[suite].prompts:
            raise UserError(
                f"the suite {suite} has no prompts: it scores samples of a run once more",
                f"name some with --set suites.{suite}.prompts=FILE",
            )
        # A configuration of suites may have none of a run's own inputs.
        require_oracle_inputs(config, suite)
        external = _inputs_of(config, suite, resolve)
    store = open_store(config.store, create=True)
    external["policy"] = [resolve_model(models.policy, store)]
    external["base"] = [resolve_model(base, store)]
    name = f"{config.name}-evaluation-{sha256_of(vars(models))[:8]}"
    return config.model_copy(update={"name": name}), external


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


def require_oracle_inputs(config: RunConfig, suite: str | None) -> None:
    """Refuses a run, or a suite, that does not name the inputs which its oracle needs."""
    score, section, title = _oracle_of(config, suite)
    for needed, oracle in score.needs.items():
        if getattr(section, ORACLE_INPUTS[needed]) is None:
            raise UserError(
                f"the oracle {oracle} needs {title}.{ORACLE_INPUTS[needed]}",
                "name it, or choose another oracle; docs/oracles.md tells what each needs",
            )


def _oracle_of(config: RunConfig, suite: str | None) -> tuple[ScoreParams, Inputs | Suite, str]:
    """An oracle's settings, the section with its inputs, and that section's name."""
    section = None if suite is None else config.suites[suite]
    if section is None or section.score is None:
        return config.score, config.inputs, "inputs"
    return section.score, section, f"suites.{suite}"
