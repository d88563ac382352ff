"""State of a run and of its steps: what is done, for how long, and about how long is left."""

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.execution.run_record import AT_WORK, RunAttempt, RunRecord, StepRecord, run_attempts
from flows.pipeline.algorithm import unread_steps
from stages.contract.errors import UserError
from stages.store.base import Store

DONE = ("done", "reused")


@dataclass(frozen=True)
class RunStatus:
    """State of a run.

    Attributes:
        attempts: Executions of its flow, oldest first; none if it was killed before the first.
        steps: Steps that the last attempt has reached, in the order in which they began; those
            that were at work when it crashed are `crashed`.
        waiting: Names of the others.
    """

    store: Store
    name: str
    attempts: Sequence[RunAttempt]
    steps: Sequence[StepRecord]
    waiting: Sequence[str]

    @property
    def state(self) -> str:
        """`running`, `completed`, `failed`, `cancelled`, `stopped` or `crashed`."""
        return self.attempts[-1].state if self.attempts else "stopped"

    @property
    def num_done(self) -> int:
        """Steps whose artifact the last attempt has."""
        return sum(step.state in DONE for step in self.steps)

    @property
    def num_steps(self) -> int:
        """All steps of the run."""
        return len(self.steps) + len(self.waiting)

    @property
    def started(self) -> float | None:
        """Begin of the last attempt."""
        return self.attempts[-1].started if self.attempts else None

    @property
    def elapsed(self) -> float | None:
        """Seconds of the last attempt; None of one that crashed."""
        if not self.attempts or self.state == "crashed":
            return None
        last = self.attempts[-1]
        return (last.ended or time.time()) - last.started

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document; times are seconds since the epoch."""
        steps = []
        for step in self.steps:
            values = step.model_dump(exclude={"key_fields"})
            attempts = len(step_logs(self.store, step))
            steps.append(values | {"seconds": step.seconds, "attempts": attempts})
        return {
            "state": self.state,
            "done": self.num_done,
            "of": self.num_steps,
            "started": self.started,
            "elapsed_seconds": self.elapsed,
            "attempts": [attempt.model_dump() for attempt in self.attempts],
            "steps": steps,
            "waiting": list(self.waiting),
        }


def run_status(record: RunRecord) -> RunStatus:
    """Reads the state of a run from its record and its logs."""
    tried = run_attempts(record)
    last = tried[-1] if tried else None
    try:
        names = [step.name for step in unread_steps(record.config())]
    except UserError:
        # Another version wrote the run: what is on record is all that is known.
        names = []
    ended = last is not None and last.state != "running"
    steps = {}
    for step in sorted(record.steps(), key=lambda step: step.started):
        # Steps of earlier attempts may be of another configuration.
        is_earlier = last is not None and (step.ended or step.started) < last.started
        if step.state != "outdated" and not is_earlier:
            has_crashed = ended and step.state in AT_WORK
            update = {"state": "crashed"} if has_crashed else {}
            steps[step.step] = step.model_copy(update=update)
    waiting = [name for name in names if name not in steps]
    return RunStatus(record.store, record.name, tried, list(steps.values()), waiting)


def step_logs(store: Store, record: StepRecord) -> list[Path]:
    """Logs of a step's attempts on this host, oldest first: their names begin with the start.

    A host that made no attempt has none.
    """
    return sorted(store.log_path(record.stage, record.key).glob("[0-9]*.log"))


def clock(moment: float | None) -> str:
    """A time of day for a person, with its time zone."""
    if moment is None:
        return "-"
    return datetime.datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
