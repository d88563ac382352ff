"""Promote: a checkpoint and its metrics in, a decision out, and the registry brought up to date.

``decision.json`` follows from the request alone. What depends on the registry as it was found (the
version's number, where aliases pointed) goes to ``registry.json``, which is telemetry. Run again
after a crash, the stage finds its version registered and its aliases moved, and changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages.contract.context import StageContext
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.contract.program import Stage
from stages.contract.registry import ModelRegistry
from stages.contract.request import ArtifactInput
from stages.promote.gate import Decision, decide
from stages.promote.params import PromoteParams


def run(ctx: StageContext[PromoteParams]) -> None:
    """Registers the checkpoint; moves the aliases to it when it passes all gates."""
    name = ctx.params.model_name
    if name is None:
        raise UserError("the request names no model", "set `promote.model_name`")
    checkpoint = _checkpoint(ctx)
    metrics = _read_metrics(ctx.path("metrics"))
    has_previous = ctx.has("previous_metrics")
    previous = _read_metrics(ctx.path("previous_metrics")) if has_previous else None
    decision = decide(ctx.params, metrics, previous)
    outcome = _update_registry(ctx, name, checkpoint, metrics, decision)
    report = {
        "model": name,
        "aliases": list(ctx.params.aliases),
        "checkpoint_digest": checkpoint.digest,
        **decision.as_json(),
    }
    (ctx.out / "decision.json").write_text(dump_json(report))
    ctx.telemetry_path("registry.json").write_text(dump_json(outcome))


def _checkpoint(ctx: StageContext[PromoteParams]) -> ArtifactInput:
    ctx.path("checkpoint")
    source = ctx.inputs["checkpoint"][0].source
    if not isinstance(source, ArtifactInput):
        raise UserError(
            "only checkpoints of this store can be registered",
            "pass the `checkpoint` of a train or sft artifact",
        )
    return source


def _read_metrics(path: Path) -> dict[str, Any]:
    try:
        metrics = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as metrics: {error}", "pass metrics.json of the evaluate stage"
        ) from error
    if not isinstance(metrics, dict):
        raise UserError(
            f"{path} holds a {type(metrics).__name__}, not metrics by name",
            "pass metrics.json of the evaluate stage",
        )
    return metrics


def _update_registry(
    ctx: StageContext[PromoteParams],
    name: str,
    checkpoint: ArtifactInput,
    metrics: dict[str, Any],
    decision: Decision,
) -> dict[str, Any]:
    registry = ModelRegistry(ctx.store)
    version = registry.register(
        name, checkpoint, metrics=metrics, run=ctx.run, step=ctx.step
    ).version
    if not decision.promoted:
        for reason in decision.reasons:
            ctx.events.warning(f"{name}:{version} is not promoted: {reason}")
        stay = {each.alias: each.version for each in registry.aliases(name)}
        return {
            "version": version,
            "aliases": {each: stay.get(each) for each in ctx.params.aliases},
        }
    for alias in ctx.params.aliases:
        registry.set_alias(name, alias, version, reason=f"passed all gates ({ctx.run}, {ctx.step})")
        ctx.events.info(f"{name}@{alias} is version {version} now")
    return {"version": version, "aliases": dict.fromkeys(ctx.params.aliases, version)}


STAGE = Stage(PromoteParams, run)
