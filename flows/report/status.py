"""State of a run and of its steps: what is done, for how long, and about how long is left."""

from __future__ import annotations

import datetime
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.execution.attempts import Attempt, attempts
from flows.execution.run_record import RunRecord, StepRecord
from flows.pipeline.algorithm import step_names
from flows.runners.attempt_log import attempt_logs, started
from stages.contract.errors import DamagedArtifactError, UserError
from stages.contract.store import Store

_DONE = ("done", "reused")


@dataclass(frozen=True)
class StepStatus:
    """State of one step.

    Attributes:
        record: What the run's record says of it.
        state: `running`, `preempted`, `done`, `reused`, `failed`, `stopped` or `crashed`.
        seconds: Time that its stage took, or has taken so far; of a reused step, that of the
            computation which made its artifact. None where it is not on record.
        attempts: Number of its stage's logs; 0 on a host that has none of them.
    """

    record: StepRecord
    state: str
    seconds: float | None
    attempts: int

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        known = self.record.model_dump(exclude={"key_fields"})
        return known | {"state": self.state, "seconds": self.seconds, "attempts": self.attempts}


@dataclass(frozen=True)
class RunStatus:
    """State of a run.

    Attributes:
        name: Its name.
        attempts: Executions of its flow, oldest first; none of a run of an older version.
        steps: Steps that the last attempt has reached, in the order in which they began.
        waiting: Names of the others.
        now: Time of the look, in seconds since the epoch.
    """

    name: str
    attempts: Sequence[Attempt]
    steps: Sequence[StepStatus]
    waiting: Sequence[str]
    now: float = field(default_factory=time.time)

    @property
    def state(self) -> str:
        """`running`, `completed`, `failed`, `cancelled`, `stopped` or `crashed`."""
        if self.attempts:
            return self.attempts[-1].state
        if not self.waiting and self.num_done == len(self.steps):
            return "completed"
        return "failed" if any(each.state == "failed" for each in self.steps) else "stopped"

    @property
    def num_done(self) -> int:
        """Steps whose artifact the last attempt has."""
        return sum(each.state in _DONE for each in self.steps)

    @property
    def num_steps(self) -> int:
        """All steps of the run."""
        return len(self.steps) + len(self.waiting)

    @property
    def started(self) -> float | None:
        """Begin of the last attempt."""
        if self.attempts:
            return self.attempts[-1].started
        return min((each.record.started for each in self.steps), default=None)

    @property
    def elapsed(self) -> float | None:
        """Seconds of the last attempt; of one that crashed, up to the last step that it noted."""
        if self.started is None:
            return None
        if self.attempts and self.attempts[-1].ended is not None:
            return self.attempts[-1].ended - self.started
        if self.state == "running":
            return self.now - self.started
        marks = [each.record.ended or each.record.started for each in self.steps]
        return max([self.started, *marks]) - self.started

    @property
    def left(self) -> float | None:
        """Expected seconds of computation that are left, by earlier steps of the same kind.

        None where a kind has not been computed yet, or nothing runs.
        """
        if self.state != "running":
            return None
        taken: dict[str, list[float]] = {}
        for each in self.steps:
            if each.state in _DONE and each.seconds is not None:
                taken.setdefault(_kind(each.record.step), []).append(each.seconds)
        total = 0.0
        for name, already in self._unfinished():
            if _kind(name) not in taken:
                return None
            total += max(0.0, statistics.median(taken[_kind(name)]) - already)
        return total

    def _unfinished(self) -> list[tuple[str, float]]:
        running = [
            (each.record.step, each.seconds or 0.0)
            for each in self.steps
            if each.state not in _DONE
        ]
        return running + [(name, 0.0) for name in self.waiting]

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document; times are seconds since the epoch."""
        return {
            "state": self.state,
            "done": self.num_done,
            "of": self.num_steps,
            "started": self.started,
            "elapsed_seconds": self.elapsed,
            "left_seconds": self.left,
            "attempts": [each.model_dump() for each in self.attempts],
            "steps": [each.to_json() for each in self.steps],
            "waiting": list(self.waiting),
        }


def run_status(record: RunRecord, *, detailed: bool = True) -> RunStatus:
    """Reads the state of a run from its record, its artifacts' manifests and its logs.

    Args:
        record: The run.
        detailed: True reads of each step also the figures that no overview of many runs shows:
            of a bucket, each manifest is a request. Without, a run that is not at work has no
            `seconds` of reused steps, and no `attempts` of any.
    """
    tried = attempts(record)
    last = tried[-1] if tried else None
    try:
        names = step_names(record.config())
    except UserError:
        # Of another version: what is on record is all that is known.
        names = []
    known = {each.step: each for each in record.steps()}
    if last is not None:
        # Steps of earlier attempts may be of another configuration.
        known = {name: each for name, each in known.items() if _time(each) >= last.started}
    ended = last is not None and last.state != "running"
    at_work = last is not None and not ended
    steps = [
        _step(record.store, each, ended, detailed=detailed or at_work) for each in known.values()
    ]
    steps.sort(key=lambda each: each.record.started)
    return RunStatus(record.name, tried, steps, [name for name in names if name not in known])


def step_logs(store: Store, record: StepRecord) -> list[Path]:
    """Logs of a step's attempts on this host, oldest first."""
    folder = store.root / "logs" / record.stage / record.key
    return sorted(attempt_logs(folder), key=_began)


def _began(log: Path) -> tuple[float, float]:
    """Start of an attempt, and its last word.

    Output that a dead orchestrator's stage left was kept before the next attempt began.
    """
    begun, last = started(log), log.stat().st_mtime
    return (last if begun is None else begun), last


def clock(moment: float | None) -> str:
    """A time of day for a person, with its time zone."""
    if moment is None:
        return "-"
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def duration(seconds: float | None) -> str:
    """A duration for a person: `4.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds is None:
        return "-"
    tenths = round(seconds, 1)
    if tenths < 60:
        return f"{tenths:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _step(store: Store, record: StepRecord, run_ended: bool, *, detailed: bool) -> StepStatus:
    state: str = record.state
    if state in ("running", "preempted") and run_ended:
        state = "crashed"
    seconds: float | None = None
    if state == "reused":
        seconds = _computed_seconds(store, record) if detailed else None
    elif record.ended is not None:
        seconds = record.ended - record.started
    elif state in ("running", "preempted"):
        seconds = time.time() - record.started
    num_logs = len(step_logs(store, record)) if detailed else 0
    return StepStatus(record, state, seconds, num_logs)


def _computed_seconds(store: Store, record: StepRecord) -> float | None:
    """Time that the computation of a step's artifact took, in this run or an earlier one."""
    try:
        manifest = store.manifest(record.stage, record.key)
    except DamagedArtifactError:
        return None
    return None if manifest is None else manifest.seconds


def _time(record: StepRecord) -> float:
    return record.ended or record.started


def _kind(step: str) -> str:
    """Steps of different iterations and shards are of one kind."""
    return re.sub(r"\d+", "#", step)
