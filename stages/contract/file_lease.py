"""A lease in a folder that hosts may share, lost with its holder.

It is a JSON file (owner, expiry) that its holder renews from a thread. Every change of the
file happens under an advisory lock on a guard file beside it, which the kernel frees when a process
dies, so that two processes never both take an expired lease. A holder on this machine, in whatever
container, keeps another file locked for as long as it lives: its lease ends with it at once, and
does not expire while it lives, however long its threads are held up.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from stages.contract.atomic import write_atomically
from stages.contract.errors import GebError
from stages.contract.file_locks import AliveLock, exclusive_lock, is_held
from stages.contract.lease import EXPIRY_SECONDS, Lease
from stages.contract.records import MisplacedError, read_record

HEARTBEAT_SECONDS = 10.0


def _machine() -> str:
    """Identity of this kernel, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class _Record(BaseModel):
    """Content of a lease file; times are seconds since the epoch."""

    owner: str
    host: str
    machine: str
    pid: int
    since: float
    expires: float


class FileLease(Lease):
    """A lease on one file.

    Args:
        path: The lease file; its parent is created.
    """

    poll_seconds = 0.5

    def __init__(self, path: Path) -> None:
        super().__init__(path.name)
        self._path = path
        self._alive_path = path.with_suffix(".alive")
        self._alive = AliveLock(self._alive_path)

    def holder(self) -> dict[str, Any] | None:
        """Holder of the lease now (``host``, ``pid``, ``since``), or None."""
        # Within the guard: the look locks the alive file for a moment, and nobody must be taking
        # the lease just then.
        with self._guard():
            record = self._read()
            return record if record is not None and self._is_alive(record) else None

    def _try_acquire(self) -> dict[str, Any] | None:
        with self._guard():
            record = self._read()
            if record is not None and record["owner"] != self._owner and self._is_alive(record):
                return record
            if not self._alive.take():
                # Some process has the lock, whatever the record says of it.
                return record or {"host": socket.gethostname(), "pid": "unknown"}
            self._write()
        return None

    def _heartbeat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            try:
                is_ours = self._renew()
            except (OSError, GebError):
                # A full disk or a file server that restarts may pass. Whether another took the
                # lease meanwhile is seen when it has; until then nobody can publish either.
                continue
            if not is_ours:
                self._lost.set()
                return

    def _renew(self) -> bool:
        with self._guard():
            record = self._read()
            if record is None or record["owner"] != self._owner:
                return False
            self._write()
        return True

    def _give_back(self) -> None:
        with self._guard():
            record = self._read()
            if record is not None and record["owner"] == self._owner:
                self._path.unlink()
            self._alive.free()

    def _write(self) -> None:
        now = time.time()
        record = {
            "owner": self._owner,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "since": now,
            "expires": now + EXPIRY_SECONDS,
        }
        if self._path.is_dir():
            # No file could be renamed to it.
            self._path.rename(self._path.with_name(f"{self._path.name}.damaged-{self._owner}"))
        write_atomically(self._path, json.dumps(record))

    def _read(self) -> dict[str, Any] | None:
        try:
            record = _Record.model_validate_json(read_record(self._path))
        except FileNotFoundError:
            return None
        except (MisplacedError, ValidationError):
            # Damaged. The lock of the alive file still tells whether a holder lives.
            return {"owner": "", "host": "unknown", "machine": _machine(), "pid": "unknown"}
        return record.model_dump()

    def _is_alive(self, record: dict[str, Any]) -> bool:
        if record["machine"] == _machine():
            return is_held(self._alive_path)
        return time.time() < record["expires"]

    def _guard(self) -> AbstractContextManager[None]:
        return exclusive_lock(self._path.with_suffix(".guard"))
