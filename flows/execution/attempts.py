"""Attempts at a run: when each began, how it ended, and whether its process still lives."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from flows.execution.run_record import RunRecord
from stages.contract.atomic import write_atomically
from stages.contract.errors import RunCancelledError, RunInterruptedError, StoppedError, StoreError
from stages.contract.file_locks import AliveLock, is_held
from stages.contract.records import MisplacedError, read_record

AttemptState = Literal["running", "completed", "failed", "cancelled", "stopped", "crashed"]
_FOLDER = "attempts"


class Attempt(BaseModel):
    """One execution of a run's flow.

    `cancelled` is a person's wish in Prefect, `stopped` Ctrl-C or SIGTERM, and `crashed` the end of
    a process that could not say why.
    """

    id: str
    state: AttemptState
    started: float
    """Seconds since the epoch, as all times here."""
    ended: float | None = None
    host: str
    pid: int
    flow_runs: tuple[str, ...] = ()
    """Ids of its flow run in Prefect and of the outermost one, until these have an end there."""
    message: str = ""


@contextmanager
def recorded_attempt(record: RunRecord, flow_runs: tuple[str, ...] = ()) -> Iterator[None]:
    """Records the block as an attempt at the run, with its end.

    Args:
        record: The run.
        flow_runs: Ids of the flow runs in Prefect that end with this process.
    """
    started = time.time()
    attempt = Attempt(
        id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started))}-{uuid.uuid4().hex[:6]}",
        state="running",
        started=started,
        host=socket.gethostname(),
        pid=os.getpid(),
        flow_runs=flow_runs,
    )
    # The kernel frees it with the process: "running" without it is said of a dead one.
    alive = AliveLock(_lock(record, attempt))
    alive.take()
    _save(record, attempt)
    try:
        yield
    except BaseException as error:
        state = _state_of(error)
        update = {"state": state, "ended": time.time(), "message": str(error)}
        # Where the store failed as well, the run's own error is the one to report.
        with suppress(StoreError):
            _save(record, attempt.model_copy(update=update))
        raise
    else:
        _save(record, attempt.model_copy(update={"state": "completed", "ended": time.time()}))
    finally:
        alive.free(remove=True)


def attempts(record: RunRecord) -> list[Attempt]:
    """Attempts at a run, oldest first; one whose process was killed on this host is `crashed`."""
    found = []
    for path in (record.path / _FOLDER).glob("*.json"):
        try:
            attempt = Attempt.model_validate_json(read_record(path))
        except (FileNotFoundError, MisplacedError, ValidationError):
            # Damaged, or of another version: the record only informs.
            continue
        is_here = attempt.host == socket.gethostname()
        if attempt.state == "running" and is_here and not is_held(_lock(record, attempt)):
            attempt = attempt.model_copy(update={"state": "crashed"})
        found.append(attempt)
    return sorted(found, key=lambda each: each.started)


def forget_flow_runs(record: RunRecord, attempt: Attempt) -> None:
    """Records that Prefect knows the end of an attempt."""
    _save(record, attempt.model_copy(update={"flow_runs": ()}))


def _state_of(error: BaseException) -> AttemptState:
    if isinstance(error, RunInterruptedError):
        return "stopped"
    if isinstance(error, RunCancelledError):
        return "cancelled"
    is_failure = isinstance(error, Exception) and not isinstance(error, StoppedError)
    return "failed" if is_failure else "stopped"


def _save(record: RunRecord, attempt: Attempt) -> None:
    path = record.path / _FOLDER / f"{attempt.id}.json"
    write_atomically(path, attempt.model_dump_json(indent=2))
    record.store.share(path)


def _lock(record: RunRecord, attempt: Attempt) -> Path:
    return record.path / _FOLDER / f"{attempt.id}.lock"
