"""Dry run: the artifacts that a run would reuse or compute, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from flows.execution.run_record import AT_WORK, RunRecord
from flows.execution.step_executor import build_request
from flows.pipeline.algorithm import ResolvedRun
from flows.pipeline.step import Step
from stages.contract.errors import DamagedArtifactError
from stages.contract.request import Request, key_fields
from stages.store.base import Artifact, Store
from stages.store.opening import open_store

Action = Literal["reuse", "run", "again"]
"""`again`: the store has the artifact, or a part of it, and `--from` computes it once more."""


@dataclass(frozen=True)
class PlannedStep:
    """One line of a plan. The key is unknown while an input has still to be made."""

    step: str
    stage: str
    action: Action
    because: str
    key: str | None


def plan(run: ResolvedRun) -> list[PlannedStep]:
    """Looks for each step of a run in the store; nothing is started."""
    config = run.config
    store = open_store(config.store, create=True)
    record = RunRecord(store, config.name)
    reused: dict[str, Artifact] = {}
    lines = []

    def add(step: Step, action: Action, because: str = "", key: str | None = None) -> None:
        lines.append(PlannedStep(step.name, step.stage, action, because, key))

    for step in run.steps:
        waiting_for = [name for name in step.upstream() if name not in reused]
        if waiting_for:
            add(step, "run", f"{waiting_for[0]} runs before it")
            continue
        request = build_request(config, store, step, reused)
        artifact, damage = _look_up(store, step.stage, request.key)
        if artifact is None:
            add(step, "run", damage or _why_computed(record, step, request), request.key)
        else:
            reused[step.name] = artifact
            add(step, "reuse", key=request.key)
    return _mark_recomputed(run, record, lines)


def _mark_recomputed(
    run: ResolvedRun, record: RunRecord, lines: list[PlannedStep]
) -> list[PlannedStep]:
    """Marks the results of the step that a run starts from, and of all that comes of it.

    Steps of two suites may have one artifact: it is computed again for both. A step whose inputs
    have still to be made has the key on record, if the run has the same settings: it may come out
    the same.
    """
    store = record.store
    is_same = record.holds(run.config)
    names: set[str] = set()
    keys = {line.key for line in lines if line.step == run.from_step}
    marked = []
    for step, line in zip(run.steps, lines, strict=True):
        comes_of = step.name == run.from_step or bool(names.intersection(step.upstream()))
        if comes_of or (line.key and line.key in keys):
            names.add(step.name)
            before = record.step(step.name) if is_same else None
            key = line.key
            if before is not None and before.state != "outdated":
                key = key or before.key
            if key and (_look_up(store, step.stage, key)[0] or store.work_files(step.stage, key)):
                keys.add(key)
                line = replace(line, action="again", because="asked to compute it again", key=key)
        marked.append(line)
    return marked


def _look_up(store: Store, stage: str, key: str) -> tuple[Artifact | None, str]:
    """The artifact of a key, if there is a whole one; and what is wrong with it."""
    try:
        return store.load(stage, key), ""
    except DamagedArtifactError as error:
        return None, str(error)


def _why_computed(record: RunRecord, step: Step, request: Request) -> str:
    before = record.step(step.name)
    if before is None:
        return "not computed yet"
    if before.key != request.key:
        now = key_fields(step.params, step.seed, request.inputs)
        return f"changed: {'; '.join(differences(before.key_fields, now))}"
    if before.state == "failed":
        reason, *_ = before.message.splitlines() or ["no message"]
        return f"it failed: {reason}"
    if before.state in (*AT_WORK, "cancelled", "stopped"):
        return "it was interrupted"
    return "its artifact is gone"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yields a line for each difference between two nested mappings of JSON values."""
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name)
        new = now.get(name)
        path = f"{at}.{name}" if at else name
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, path)
        elif old == new:
            continue
        elif at == "inputs":
            yield f"input {name}"
        else:
            yield f"{path} {old!r} → {new!r}"
