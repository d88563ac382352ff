"""Dry run: the artifacts that a run would reuse or compute, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flows.execution.run_record import AT_WORK, RunRecord
from flows.execution.step_executor import build_request
from flows.pipeline.algorithm import ResolvedRun
from flows.pipeline.step import Step
from flows.runners.choose import check_place
from stages.contract.errors import DamagedArtifactError
from stages.contract.request import Request, key_fields
from stages.store.base import Artifact
from stages.store.opening import open_store

_SHOWN_CHANGES = 3
Action = Literal["reuse", "run"]


@dataclass(frozen=True)
class PlannedStep:
    """One line of a plan. The key is unknown while an input has still to be made."""

    step: str
    stage: str
    action: Action
    because: str
    key: str | None


def plan(run: ResolvedRun) -> list[PlannedStep]:
    """Looks for each step of a run in the store; nothing is started.

    Raises:
        UserError: A setting is wrong that only the place of the stages knows.
    """
    config = run.config
    check_place(config.execution, config.resources, config.store)
    planner = _Planner(run)
    return [PlannedStep(step.name, step.stage, *planner.look_up(step)) for step in run.steps]


class _Planner:
    def __init__(self, run: ResolvedRun) -> None:
        self._config = run.config
        self._store = open_store(run.config.store, create=True)
        self._record = RunRecord(self._store, run.config.name)
        self._forced = run.recompute
        self._made: dict[str, Artifact] = {}

    def look_up(self, step: Step) -> tuple[Action, str, str | None]:
        """Action for a step, why, and its key."""
        waiting_for = [name for name in step.upstream() if name not in self._made]
        if waiting_for:
            return "run", f"{waiting_for[0]} runs before it", None
        request = build_request(self._config, self._store, step, self._made)
        artifact = None
        damage = ""
        try:
            artifact = self._store.load(request.stage, request.key)
        except DamagedArtifactError as error:
            damage = str(error)
        if artifact is not None and not self._forced(step):
            self._made[step.name] = artifact
            return "reuse", "", request.key
        if artifact is not None:
            because = "asked to compute it again"
        else:
            because = damage or self._explain(step, request)
        return "run", because, request.key

    def _explain(self, step: Step, request: Request) -> str:
        before = self._record.step(step.name)
        if before is None:
            return "not computed yet"
        if before.key != request.key:
            now = key_fields(step.params, step.seed, request.inputs)
            changes = list(differences(before.key_fields, now))
            text = "changed: " + "; ".join(changes[:_SHOWN_CHANGES])
            left = len(changes) - _SHOWN_CHANGES
            if left > 0:
                text += f" and {left} more"
            return text
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
        elif old != new:
            if path.startswith("inputs."):
                yield f"input {name}"
            else:
                yield f"{path} {old!r} → {new!r}"
