"""Home folder of a `geb up`: its database, its logs, and the record of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.contract.atomic import write_atomically
from stages.contract.errors import GebError
from stages.contract.file_locks import AliveLock, is_held

DEFAULT_HOME = Path("~/.geb")
HOME_VARIABLE = "GEB_HOME"
_POLL_SECONDS = 0.1


def default_home() -> Path:
    """Home folder of a `geb up` without ``--home``."""
    return Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)


class Standing(BaseModel):
    """Record of a running `geb up`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    ui: str
    """Address of the Prefect UI."""
    api: str
    """Address of the Prefect API, for PREFECT_API_URL."""
    store: str
    """Store that the deployments start with."""
    database: str | None = None
    """Database that was given for the server, without its password; None is a file of this home."""
    supervisors: tuple[int, ...]
    """Process ids of its supervisors; each ends all processes below it on SIGTERM."""


class Home:
    """One home folder. A lock on it is held for as long as its `geb up` lives.

    Args:
        path: The folder; made when it is claimed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def prefect(self) -> Path:
        """Prefect's own folder: its database, leases and profiles."""
        return self.path / "prefect"

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.path / f"{name}.log"

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Holds the lock; yields False where another process has it."""
        lock = AliveLock(self._lock)
        try:
            yield lock.take()
        finally:
            lock.free()

    def announce(self, standing: Standing) -> None:
        """Writes the record; to be called by the holder of the lock."""
        write_atomically(self._state, standing.model_dump_json(indent=2))

    def retract(self) -> None:
        """Removes the record."""
        self._state.unlink(missing_ok=True)

    def standing(self) -> Standing | None:
        """Record of the running `geb up`; None if there is none, or while it starts."""
        return self._announced() if self._is_claimed() else None

    def end(self, timeout_seconds: float) -> bool:
        """Ends the running `geb up` of this home, and the processes that a killed one left.

        Returns:
            Whether there was anything to end.

        Raises:
            GebError: It does not end in time, or is only starting.
        """
        standing = self.standing()
        if standing is None and self._is_claimed():
            raise GebError(f"`geb up` of {self.path} is starting or ending; try again in a moment")
        ended = standing is not None and self._end([standing.pid], timeout_seconds)
        return self.end_leftovers(timeout_seconds) or ended

    def end_leftovers(self, timeout_seconds: float) -> bool:
        """Ends the processes that a killed `geb up` left; see :meth:`end`."""
        announced = self._announced()
        if announced is None:
            return False
        ended = self._end(announced.supervisors, timeout_seconds)
        self.retract()
        return ended

    def _is_claimed(self) -> bool:
        return is_held(self._lock)

    def _end(self, pids: Sequence[int], timeout_seconds: float) -> bool:
        waiting = [pid for pid in pids if _is_ours(pid)]
        for pid in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        while any(_is_ours(pid) for pid in waiting):
            if time.monotonic() > deadline:
                raise GebError(f"it does not end: pid {waiting}; its logs are in {self.path}")
            time.sleep(_POLL_SECONDS)
        return bool(waiting)

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    @property
    def _state(self) -> Path:
        return self.path / "up.json"

    def _announced(self) -> Standing | None:
        try:
            return Standing.model_validate(json.loads(self._state.read_text()))
        except (FileNotFoundError, ValueError, ValidationError):
            return None


def _is_ours(pid: int) -> bool:
    """True where a process runs and is one of ours: its id may have been used again."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and (
        b"stages.contract.supervisor" in command or b"up" in command.split(b"\0")
    )
