"""Locks on files, and the lease on a key: a file that one process at a time holds.

The kernel frees a lock when its holder dies, however it dies. Unlike a pid, a lock means the same
in every container that sees the file: pids differ between pid namespaces.

A lease is JSON (owner, expiry) in a folder that hosts may share, and its holder renews it from a
thread. Every change of the file happens under a lock on a guard file next to it, so that two
processes never both take an expired lease. A holder on this machine, in whatever container, keeps
another file locked for as long as it lives: its lease ends with it at once, and does not expire
while it lives, however long its threads are held up.
"""

import fcntl
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from pydantic import BaseModel

from stages.contract.atomic import write_atomically
from stages.contract.errors import DamagedRecordError, GebError, LeaseLostError, StoppedError
from stages.contract.records import read_record

EXPIRY_SECONDS = 120.0
HEARTBEAT_SECONDS = 10.0


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Locks a file, which is created if there is none, against all other processes.

    Shared locks do not exclude each other.

    Returns:
        The open descriptor that holds the lock, for the caller to close; None, at once, if
        another has the lock.
    """
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Holds the lock on a file within the block, which may remove the file; waits for it."""
    while True:
        descriptor = _open(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        # The last holder has removed the file, and another file may have its name now.
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """True while some process on this machine holds the lock on a file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # For writing: NFS locks no file that is open for reading only.
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        # The file belongs to another user, who shares the lock.
        return os.open(path, os.O_RDONLY)


def _machine() -> str:
    """Identity of this kernel, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class LeaseHolder(BaseModel):
    """Content of a lease file; its process is 0 if that is not known."""

    owner: str
    host: str
    machine: str
    pid: int
    expires: float
    """Seconds since the epoch."""


class FileLease:
    """A lease on one file; use :meth:`acquire` and the object as a context manager."""

    poll_seconds = 0.5
    """Time between two looks at a lease that another holds."""

    def __init__(self, path: Path) -> None:
        self._owner = uuid.uuid4().hex
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None
        self._path = path
        self._guard_path = path.with_suffix(".guard")
        self._alive_path = path.with_suffix(".alive")
        self._alive_lock: int | None = None

    def holder(self) -> LeaseHolder | None:
        """Holder of the lease now, or None."""
        if not self._path.exists():
            return None
        # Within the guard: the look locks the alive file for a moment, and no process must take the
        # lease just then.
        with exclusive_lock(self._guard_path):
            return self._living_holder()

    def acquire(
        self,
        *,
        waiting: Callable[[LeaseHolder], None] | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """Takes the lease, waiting for its present holder.

        ``waiting`` is called once with the holder, before the first wait.

        Raises:
            StoppedError: ``stopping`` was set.
        """
        stopping = stopping or threading.Event()
        while (holder := self._try_acquire()) is not None:
            if waiting is not None:
                waiting(holder)
                waiting = None
            if stopping.wait(self.poll_seconds):
                raise StoppedError(f"stopped while waiting for the lease {self._path.name}")
        self._thread = threading.Thread(target=self._heartbeat, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises LeaseLostError if another process took the lease over."""
        if self._lost.is_set():
            raise LeaseLostError(f"lease {self._path.name} was taken over by another process")

    def release(self) -> None:
        """Gives the lease back; harmless when it was lost or never taken."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with exclusive_lock(self._guard_path):
            if self._is_ours():
                self._path.unlink()
                self._alive_path.unlink(missing_ok=True)
                self._guard_path.unlink()
            self._close_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _try_acquire(self) -> LeaseHolder | None:
        """Takes the lease and returns None, or returns its living holder."""
        with exclusive_lock(self._guard_path):
            holder = self._living_holder()
            if holder is None:
                self._alive_lock = try_lock(self._alive_path)
                if self._alive_lock is None:
                    # Another process has it since the look.
                    return self._read() or self._holder(pid=0)
                try:
                    self._write()
                except BaseException:
                    self._close_alive()
                    raise
            return holder

    def _heartbeat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            # A supervisor elsewhere takes it for a sign, which a full disk must not end.
            with suppress(OSError):
                os.utime(self._path)
            # A full disk or a file server that restarts may pass. Whether another took the lease
            # meanwhile is seen when it has; until then no process can publish either.
            with suppress(OSError, GebError), exclusive_lock(self._guard_path):
                if not self._is_ours():
                    self._lost.set()
                    return
                self._write()

    def _living_holder(self) -> LeaseHolder | None:
        record = self._read()
        if record and record.machine != _machine() and time.time() < record.expires:
            return record
        # Some process has the lock, whatever the record holds.
        return (record or self._holder(pid=0)) if is_held(self._alive_path) else None

    def _is_ours(self) -> bool:
        record = self._read()
        return record is not None and record.owner == self._owner

    def _close_alive(self) -> None:
        if self._alive_lock is not None:
            os.close(self._alive_lock)
            self._alive_lock = None

    def _write(self) -> None:
        write_atomically(self._path, self._holder(os.getpid()).model_dump_json())

    def _holder(self, pid: int) -> LeaseHolder:
        return LeaseHolder(
            owner=self._owner,
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            expires=time.time() + EXPIRY_SECONDS,
        )

    def _read(self) -> LeaseHolder | None:
        with suppress(FileNotFoundError, DamagedRecordError):
            return read_record(self._path, LeaseHolder)
        return None
