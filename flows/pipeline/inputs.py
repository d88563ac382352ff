"""Inputs of a run from outside the store: policy, prompts, oracles, those of its suites."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flows.pipeline.config import RunConfig
from flows.pipeline.external import External, resolve
from stages.contract.adapters import base_of_adapter
from stages.contract.errors import UserError
from stages.contract.registry import ModelRegistry
from stages.contract.store import Store

ORACLE_INPUTS = {"model": "oracle_model", "code": "oracle_code"}
"""Field of `inputs` for each input of the score stage that comes from outside."""
MODEL_INPUTS = ("policy", "oracle_model")
"""Fields of `inputs` that name a model; the others name data or code."""


def resolve_model(place: str, store: Store) -> list[External]:
    """Turns a registered model, a checkpoint folder or a hub id into inputs with an identity.

    Args:
        place: ``name``, ``name@alias`` or ``name:version`` of the registry, or see :func:`resolve`.
        store: The store whose registry is asked.

    Returns:
        The whole checkpoint, and after it the adapter on it where the registered model is one.

    Raises:
        UserError: There is no such model.
        HubUnreachableError: The hub cannot be asked for the revision.
    """
    if "/" in place or Path(place).expanduser().exists():
        return [resolve(place, "model")]
    version, artifact = ModelRegistry(store).resolve(place)
    base = base_of_adapter(artifact.manifest, version.checkpoint.path)
    return [version.checkpoint] if base is None else [base, version.checkpoint]


def resolve_inputs(config: RunConfig) -> dict[str, list[External]]:
    """Finds everything that comes into a run from outside.

    Raises:
        UserError: Something is missing, or what is needed is not named.
    """
    inputs = config.inputs
    if not inputs.prompts:
        raise UserError("inputs.prompts names no prompts", "name a file or a hub data set")
    if inputs.policy is None and inputs.warm_start is None:
        raise UserError(
            "there is no policy to start from",
            "set inputs.policy (a checkpoint), or inputs.warm_start (data for a supervised start)",
        )
    require_oracle_inputs(config)
    models = {"policy": inputs.policy, "oracle_model": inputs.oracle_model}
    files = {
        "test_prompts": inputs.test_prompts,
        "warm_start": inputs.warm_start,
        "oracle_code": inputs.oracle_code,
    }
    found = {name: [resolve(place, "model")] for name, place in models.items() if place}
    found |= {name: [resolve(place, "dataset")] for name, place in files.items() if place}
    found["prompts"] = [resolve(place, "dataset") for place in inputs.prompts]
    whole = {name: found.get(name, []) for name in (*models, *files, "prompts")}
    for name in config.suites:
        for place, sources in suite_inputs(config, name, whole).items():
            whole[suite_input(name, place)] = sources
    return whole


SUITE_INPUTS = ("prompts", "test_prompts", "length_control", *ORACLE_INPUTS.values())
"""Inputs of a suite, by the names that a run's own have."""


def suite_input(suite: str, name: str) -> str:
    """Name of a suite's input among those of its run."""
    return f"suites.{suite}.{name}"


def suite_inputs(
    config: RunConfig, name: str, run: Mapping[str, list[External]]
) -> dict[str, list[External]]:
    """Finds the inputs of a suite from outside, under the names that a run's own inputs have.

    Args:
        config: The run's configuration.
        name: Name of the suite.
        run: The run's inputs, of which a suite without an oracle takes the oracle's.

    Raises:
        UserError: Something is missing, or what is needed is not named.
    """
    suite = config.suites[name]
    found: dict[str, list[External]] = {"prompts": [], "length_control": []}
    places = {"test_prompts": ("prompts", suite.prompts)}
    if suite.length_control is not None:
        places["length_control"] = ("length_control", suite.length_control)
    for each, (field, place) in places.items():
        try:
            found[each] = [resolve(place, "dataset")]
        except UserError as error:
            raise error.at(f"suites.{name}.{field}") from error
    if suite.score is None:
        return found | {place: list(run[place]) for place in ORACLE_INPUTS.values()}
    for needed, oracle in suite.score.needs.items():
        if getattr(suite, ORACLE_INPUTS[needed]) is None:
            raise UserError(
                f"the oracle {oracle} needs suites.{name}.{ORACLE_INPUTS[needed]}",
                "name it; docs/oracles.md tells what each oracle needs",
            )
    models = [resolve(place, "model") for place in (suite.oracle_model,) if place]
    code = [resolve(place, "dataset") for place in (suite.oracle_code,) if place]
    return found | {"oracle_model": models, "oracle_code": code}


def require_oracle_inputs(config: RunConfig) -> None:
    """Checks that the inputs which the oracle needs are named.

    Raises:
        UserError: One is not.
    """
    for name, oracle in config.score.needs.items():
        place = ORACLE_INPUTS[name]
        if getattr(config.inputs, place) is None:
            raise UserError(
                f"the oracle {oracle} needs inputs.{place}",
                "name it, or choose another score.oracle; docs/oracles.md tells what each needs",
            )
