"""Promote: a checkpoint and its metrics in, a decision out, and the registry brought up to date.

The decision follows from the request and from the version that each alias held before this one.
Run again, the stage finds its version registered; it decides as before and moves no alias that has
meant this version already. So neither a newer promotion nor one by hand is undone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.contract.records import read_record
from stages.contract.request import ArtifactInput
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.promote.gate import GateResult, decide
from stages.promote.params import PromoteParams
from stages.store.registry import Alias, ModelRegistry, ModelVersion


def run(ctx: StageContext[PromoteParams]) -> None:
    """Registers the checkpoint; moves the aliases to it when it passes all gates."""
    name = ctx.params.model_name
    if name is None:
        raise UserError("the request names no model", "set `promote.model_name`")
    checkpoint = _checkpoint(ctx)
    metrics = _read_metrics(ctx.path("metrics"))
    names = ctx.params.suites_hold
    paths = ctx.paths("suite_metrics") if names else []
    suites = {name: _read_metrics(path) for name, path in zip(names, paths, strict=True)}
    registry = ModelRegistry(ctx.store)
    run = ctx.request.run
    step = ctx.request.step
    with registry.locked(name):
        version = registry.register(name, checkpoint, metrics=metrics, run=run, step=step)
        present = {alias.alias: alias for alias in registry.aliases(name)}
        aliases = {alias: present.get(alias) for alias in ctx.params.aliases}
        held = [_held_before(registry, version, alias) for alias in aliases.values() if alias]
        before = {f"{name}:{holder.version}": holder.metrics for holder in held if holder}
        gates = decide(ctx.params, metrics, before, suites)
        _move_aliases(ctx, registry, version, gates, aliases)
    report = {
        "model": name,
        "aliases": list(ctx.params.aliases),
        "promoted": all(gate.passed for gate in gates),
        "gates": [asdict(gate) for gate in gates],
    }
    (ctx.out / "decision.json").write_text(dump_json(report))


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
    return read_record(path, dict[str, Any], "pass metrics.json of the evaluate stage")


def _held_before(registry: ModelRegistry, own: ModelVersion, alias: Alias) -> ModelVersion | None:
    """The version that the alias held before it moved to ``own``, or now if it never did."""
    moves = [move.version for move in alias.history]
    place = moves.index(own.version) - 1 if own.version in moves else len(moves) - 1
    return registry.version(own.name, moves[place]) if place >= 0 else None


def _move_aliases(
    ctx: StageContext[PromoteParams],
    registry: ModelRegistry,
    own: ModelVersion,
    gates: Sequence[GateResult],
    aliases: Mapping[str, Alias | None],
) -> None:
    """Moves the aliases if the gates allow it.

    An alias stays if it has meant this version before, or means a newer iteration of the same run.
    """
    request = ctx.request
    failed = [gate for gate in gates if not gate.passed]
    for gate in failed:
        ctx.events.warning(f"{own.name}:{own.version} is not promoted: {gate.reason}")
    if failed:
        return
    for alias, now in aliases.items():
        if now and own.version in [move.version for move in now.history]:
            ctx.events.info(
                f"{own.name}@{alias} stays version {now.version}: version {own.version} was "
                "promoted before"
            )
            continue
        holder = registry.version(own.name, now.version) if now else None
        newer = holder is not None and _iteration(holder.step) > _iteration(request.step)
        if holder and newer and holder.run == request.run:
            ctx.events.info(
                f"{own.name}@{alias} stays version {holder.version}: {holder.step} of the same run "
                f"is newer than {request.step}"
            )
            continue
        reason = f"passed all gates ({request.run}, {request.step})"
        registry.set_alias(own.name, alias, own.version, reason=reason)
        ctx.events.info(f"{own.name}@{alias} is version {own.version} now")


def _iteration(step: str) -> int:
    """Iteration t that a step's name begins with; 0 outside of iterations."""
    iteration = re.match(r"iteration-(\d+)/", step)
    return int(iteration[1]) if iteration else 0


STAGE = Stage(PromoteParams, run)
