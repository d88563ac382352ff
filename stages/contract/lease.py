"""The right to compute one key: held by one process at a time, lost with its holder.

A lease is a JSON file (owner, expiry) that its holder renews from a thread. Every change of the
file happens under an advisory lock on a guard file beside it, which the kernel frees when a process
dies, so that two processes never both take an expired lease. A holder on this machine, in whatever
container, keeps another file locked for as long as it lives: its lease ends with it at once, and
does not expire while it lives, however long its threads are held up.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from stages.contract.alive import AliveLock, is_held
from stages.contract.errors import LeaseLostError

EXPIRY_SECONDS = 120.0
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.5


def _machine() -> str:
    """Identity of this kernel, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Lease:
    """A lease on one name; use :meth:`acquire` and the object as a context manager.

    Args:
        path: The lease file; its parent is created.
    """

    poll_seconds = POLL_SECONDS

    def __init__(self, path: Path) -> None:
        self._path = path
        self._alive_path = path.with_suffix(".alive")
        self._alive = AliveLock(self._alive_path)
        self._owner = uuid.uuid4().hex
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None

    def holder(self) -> dict[str, Any] | None:
        """Who holds the lease now (``host``, ``pid``, ``since``), or None."""
        with self._guard():
            record = self._read()
        return record if record is not None and self._is_alive(record) else None

    def acquire(self, *, waiting: Callable[[dict[str, Any]], None] | None = None) -> bool:
        """Takes the lease, waiting for its present holder.

        Args:
            waiting: Called once with the holder's record before the first wait.

        Returns:
            True when the lease was free at once, False when a holder was waited for (the artifact
            may be there now).
        """
        at_once = True
        while (holder := self._try_acquire()) is not None:
            if at_once and waiting is not None:
                waiting(holder)
            at_once = False
            time.sleep(POLL_SECONDS)
        self._thread = threading.Thread(target=self._heartbeat, name="lease", daemon=True)
        self._thread.start()
        return at_once

    def check(self) -> None:
        """Raises LeaseLostError if another process took the lease over."""
        if self._lost.is_set():
            raise LeaseLostError(f"lease {self._path.name} was taken over by another process")

    def release(self) -> None:
        """Gives the lease back; harmless when it was lost."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._guard():
            record = self._read()
            if record is not None and record["owner"] == self._owner:
                self._path.unlink()
            self._alive.free()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _try_acquire(self) -> dict[str, Any] | None:
        """Takes the lease and returns None, or returns its living holder."""
        with self._guard():
            record = self._read()
            if record is not None and record["owner"] != self._owner and self._is_alive(record):
                return record
            self._alive.take()
            self._write()
        return None

    def _heartbeat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with self._guard():
                record = self._read()
                if record is None or record["owner"] != self._owner:
                    self._lost.set()
                    return
                self._write()

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
        scratch = self._path.with_suffix(f".{self._owner}")
        scratch.write_text(json.dumps(record))
        scratch.replace(self._path)

    def _read(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._path.read_text())
        except FileNotFoundError:
            return None

    def _is_alive(self, record: dict[str, Any]) -> bool:
        if record["machine"] == _machine():
            return is_held(self._alive_path)
        return time.time() < record["expires"]

    @contextmanager
    def _guard(self) -> Iterator[None]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".guard").open("a") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            yield
