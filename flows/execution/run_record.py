"""Run records: a run's configuration, state and key of each of its steps, and its attempts.

A record informs people. Whether a step is done, only the store's artifacts tell.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from flows.pipeline.config import RunConfig
from flows.pipeline.loading import check_config
from flows.pipeline.names import is_name
from stages.contract.errors import (
    DamagedRecordError,
    RunCancelledError,
    RunInterruptedError,
    StoreError,
    UserError,
)
from stages.contract.records import read_record
from stages.store.base import Store
from stages.store.locks import exclusive_lock, is_held, try_lock

RunAttemptState = Literal["running", "completed", "failed", "cancelled", "stopped", "crashed"]
StepState = Literal[
    "waiting",
    "running",
    "preempted",
    "done",
    "reused",
    "failed",
    "cancelled",
    "stopped",
    "outdated",
    "crashed",
]
"""State of a step.

`waiting`: for one of `execution.parallel` slots, for another run that computes the key, or for a
place. `outdated`: the run has other settings now, by which the step has another key, or none; or
`--from` computes it again.
`crashed`: the run's process was killed while the step was at work; no file on record has it.
"""
AT_WORK = ("waiting", "running", "preempted")
"""States of a step that goes on, at once or after a while."""

_ATTEMPTS = "attempts"


class DamagedRecordWarning(UserWarning):
    """A record that only informs cannot be read."""


class StepRecord(BaseModel):
    """Last known state of one step."""

    step: str
    stage: str
    key: str
    key_fields: dict[str, Any]
    state: StepState
    started: float
    ended: float | None = None
    message: str = ""

    @property
    def seconds(self) -> float | None:
        """Time that its stage took, or has taken so far; None of a reused step."""
        if self.state == "reused":
            return None
        if self.ended is not None:
            return self.ended - self.started
        return time.time() - self.started if self.state in AT_WORK else None


class RunRecord:
    """A run's folder in the store.

    With ``refresh``, the records of other hosts are fetched; :func:`runs` does so for all at once.
    """

    def __init__(self, store: Store, name: str, *, refresh: bool = True) -> None:
        self.store = store
        self.name = name
        self.path = store.run_path(name)
        if refresh:
            store.refresh(f"runs/{name}")

    @classmethod
    def existing(cls, store: Store, name: str) -> RunRecord:
        """A run that has been started before; UserError if the store has none."""
        record = cls(store, name) if is_name(name) else None
        if record is None or not os.path.lexists(record.path / "config.json"):
            names = ", ".join(runs(store)) or "none"
            raise UserError(
                f"no run {name!r} in {store.location}",
                f"name the run, not its file; runs there: {names}",
            )
        return record

    def save_config(self, config: RunConfig) -> None:
        """Writes the resolved configuration."""
        self.write("config.json", config.to_json())

    def start(self, config: RunConfig, keys: Mapping[str, str | None]) -> None:
        """Puts the configuration of an attempt on record, and outdates steps of another one.

        A file whose content has changed outdates steps, too.

        Args:
            config: The configuration.
            keys: Key of each step that is known before it begins, by the step's name; empty for a
                step that is computed again.

        Raises:
            UserError: A process of this host works on the run, with another configuration or with
                artifacts that are computed again.
        """
        is_same = self.holds(config)
        if not is_same or "" in keys.values():
            for attempt in run_attempts(self):
                if attempt.state == "running" and attempt.host == socket.gethostname():
                    raise UserError(
                        f"run {self.name} is at work (pid {attempt.pid})",
                        "give this one another name (--set name=NAME), or end that one first",
                    )
        before = list(self.steps())
        has_changed = any(keys.get(step.step) not in (None, step.key) for step in before)
        for step in before if has_changed or not is_same else ():
            if keys.get(step.step) != step.key:
                self.save_step(step.model_copy(update={"state": "outdated"}))
        self.save_config(config)

    def write(self, name: str, text: str) -> str:
        """Writes a file of the run's folder, for other hosts too, and returns its address."""
        return self.store.write(self.path / name, text)

    def holds(self, config: RunConfig) -> bool:
        """True if the run was last started with this configuration."""
        path = self.path / "config.json"
        return path.exists() and path.read_bytes() == config.to_json().encode()

    def config(self, *, strict: bool = False) -> RunConfig:
        """The configuration that the run was last started with.

        Settings of another version are an error if ``strict``, else they are left out.
        """
        path = self.path / "config.json"
        remedy = "start the run again: `geb run CONFIG`"
        try:
            values = read_record(path, dict[str, Any], remedy)
            return check_config(values, str(path), strict=strict)
        except UserError as error:
            # Another version wrote it, with settings of its time.
            raise UserError(error.message, remedy) from error

    def save_step(self, record: StepRecord) -> None:
        """Writes the state of a step."""
        self.write(_step_file(record.step), record.model_dump_json(indent=2))

    def step(self, name: str) -> StepRecord | None:
        """Last known state of one step, or None."""
        try:
            return _read_step(self.path / _step_file(name))
        except (FileNotFoundError, DamagedRecordError):
            # The record only informs, so it counts as unknown.
            return None

    def steps(self, *, strict: bool = False) -> Iterator[StepRecord]:
        """All steps on record, by name; a damaged record is a warning, if ``strict`` an error."""
        for path in sorted((self.path / "steps").glob("*.json")):
            try:
                yield _read_step(path)
            except FileNotFoundError:
                # Another process renames it just now.
                continue
            except DamagedRecordError as error:
                if strict:
                    raise
                warnings.warn(DamagedRecordWarning(str(error)), stacklevel=2)


def resume_command(name: str, store: str) -> str:
    """The command that resumes a run, from any folder."""
    return shlex.join(["geb", "resume", name, "--store", store])


def runs(store: Store) -> list[str]:
    """Names of the store's runs, the last started first.

    A folder whose name no run can have, such as `nightly (copy)`, is none of them.
    """
    store.refresh("runs")
    configs = (store.root / "runs").glob("*/config.json")
    newest = sorted(configs, key=lambda path: path.lstat().st_mtime, reverse=True)
    return [path.parent.name for path in newest if is_name(path.parent.name)]


def recorded(store: Store) -> list[str]:
    """Names of everything that has steps on record: runs and evaluations."""
    store.refresh("runs")
    steps = (store.root / "runs").glob("*/steps/*.json")
    return sorted({path.parents[1].name for path in steps})


def _step_file(step: str) -> str:
    return f"steps/{step.replace('/', '~')}.json"


def _read_step(path: Path) -> StepRecord:
    return read_record(path, StepRecord, "remove it; `geb resume RUN` writes it again")


class RunAttempt(BaseModel):
    """One execution of a run's flow.

    `cancelled` is a person's wish in Prefect, `stopped` Ctrl-C or SIGTERM, and `crashed` the end of
    a process that could not say why.
    """

    id: str
    state: RunAttemptState
    started: float
    """Seconds since the epoch, as all times here."""
    ended: float | None = None
    host: str
    pid: int
    message: str = ""


@contextmanager
def recorded_run_attempt(
    record: RunRecord, begin: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Records the block as an attempt at the run, with its end.

    ``begin`` is called first, while no other attempt at the run begins on this host. Errors of the
    block leave with the command that resumes the run as their note.
    """
    started = time.time()
    attempt = RunAttempt(
        id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started))}-{uuid.uuid4().hex[:6]}",
        state="running",
        started=started,
        host=socket.gethostname(),
        pid=os.getpid(),
    )
    # The kernel frees the lock with the process: an attempt "running" without it is dead.
    alive_path = _lock_path(record, attempt)
    with exclusive_lock(record.path / _ATTEMPTS / ".begin"):
        begin()
        alive_lock = try_lock(alive_path)
        _save(record, attempt)
    try:
        yield
    except BaseException as error:
        error.add_note(resume_command(record.name, record.store.location))
        state = _state_of(error)
        update = {"state": state, "ended": time.time(), "message": str(error)}
        # Where the store failed as well, the run's own error is the one to report.
        with suppress(StoreError, UserError):
            _save(record, attempt.model_copy(update=update))
        raise
    else:
        _save(record, attempt.model_copy(update={"state": "completed", "ended": time.time()}))
    finally:
        alive_path.unlink(missing_ok=True)
        if alive_lock is not None:
            os.close(alive_lock)


def run_attempts(record: RunRecord) -> list[RunAttempt]:
    """Attempts at a run, oldest first; one whose process was killed on this host is `crashed`."""
    read = []
    for path in (record.path / _ATTEMPTS).glob("*.json"):
        try:
            attempt = read_record(path, RunAttempt)
        except (FileNotFoundError, DamagedRecordError):
            # Damaged, or of another version: the record only informs.
            continue
        is_here = attempt.host == socket.gethostname()
        if attempt.state == "running" and is_here and not is_held(_lock_path(record, attempt)):
            attempt = attempt.model_copy(update={"state": "crashed"})
        read.append(attempt)
    return sorted(read, key=lambda attempt: attempt.started)


def _state_of(error: BaseException) -> RunAttemptState:
    if isinstance(error, RunInterruptedError) or not isinstance(error, Exception):
        return "stopped"
    return "cancelled" if isinstance(error, RunCancelledError) else "failed"


def _save(record: RunRecord, attempt: RunAttempt) -> None:
    record.write(f"{_ATTEMPTS}/{attempt.id}.json", attempt.model_dump_json(indent=2))


def _lock_path(record: RunRecord, attempt: RunAttempt) -> Path:
    return record.path / _ATTEMPTS / f"{attempt.id}.lock"
