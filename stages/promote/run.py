"""Promote: a checkpoint and its metrics in, a decision out, and the registry brought up to date.

The decision follows from the request and from the version that each alias held before this one.
Run again, the stage finds its version registered; it decides as before and moves no alias that has
meant this version already. So neither a newer promotion nor one by hand is undone.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.contract.records import read_record
from stages.contract.request import ArtifactInput
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.promote.gate import decide
from stages.promote.params import PromoteParams
from stages.store.registry import Alias, ModelRegistry, ModelVersion


def run(ctx: StageContext[PromoteParams]) -> None:
    """Registers the checkpoint; moves the aliases to it when it passes all gates."""
    name = ctx.params.model_name
    assert name is not None, "filled in by the run"
    [checkpoint] = ctx.request.inputs["checkpoint"]
    assert isinstance(checkpoint, ArtifactInput), "an earlier step's"
    metrics = _read_metrics(ctx.path("metrics"))
    suites = {}
    if ctx.params.suites_hold:
        paths = ctx.paths("suite_metrics")
        suites = dict(zip(ctx.params.suites_hold, map(_read_metrics, paths), strict=True))
    request = ctx.request
    registry = ModelRegistry(ctx.store)
    with registry.locked(name):
        version = registry.register(
            name,
            checkpoint,
            metrics=metrics,
            measured_by=ctx.params.measured_by,
            run=request.run,
            step=request.step,
            iteration=ctx.params.iteration,
        )
        present = registry.aliases(name)
        before = {}
        for alias in ctx.params.aliases:
            if holder := _held_before(registry, version, present.get(alias, [])):
                figures = holder.figures.get(ctx.params.measured_by, {})
                before[f"{name}:{holder.version}"] = figures
        candidate = f"{name}:{version.version}"
        gates = decide(ctx.params, metrics, before, suites, candidate)
        failed = [gate for gate in gates if not gate.passed]
        for gate in failed:
            ctx.events.warning(f"{candidate} is not promoted: {gate.reason}")
        promoted_to = []
        for alias in () if failed else ctx.params.aliases:
            if _move_alias(ctx, registry, version, alias, present.get(alias, [])):
                promoted_to.append(alias)
    report = {
        "model": name,
        "aliases": promoted_to,
        "gates": [asdict(gate) for gate in gates],
    }
    ctx.write_json("decision.json", report)


def _read_metrics(path: Path) -> dict[str, Any]:
    return read_record(path, dict[str, Any], "pass metrics.json of the evaluate stage")


def _held_before(
    registry: ModelRegistry, version: ModelVersion, alias: Alias
) -> ModelVersion | None:
    """The version that an alias held before it moved to ``version``, or now if it never did."""
    held = [move.version for move in alias]
    if version.version in held:
        held = held[: held.index(version.version)]
    return registry.version(version.name, held[-1]) if held else None


def _move_alias(
    ctx: StageContext[PromoteParams],
    registry: ModelRegistry,
    version: ModelVersion,
    name: str,
    alias: Alias,
) -> bool:
    """Moves an alias to a version that passed all gates; True if it means or meant that version.

    It stays if it has meant this version before, or means a newer iteration of the same run.
    """
    request = ctx.request
    title = f"{version.name}@{name}"
    if alias:
        obstacle = ""
        holder = registry.version(version.name, alias[-1].version)
        was_promoted = version.version in [move.version for move in alias]
        if was_promoted:
            obstacle = f"version {version.version} was promoted before"
        elif holder.run == request.run and holder.iteration > ctx.params.iteration:
            obstacle = f"{holder.step} of the same run is newer than {request.step}"
        if obstacle:
            ctx.events.info(f"{title} stays version {holder.version}: {obstacle}")
            return was_promoted
    reason = f"passed all gates ({request.run}, {request.step})"
    registry.set_alias(version.name, name, version.version, reason=reason)
    ctx.events.info(f"{title} is version {version.version} now")
    return True


STAGE = Stage(PromoteParams, run)
