"""Locks on files, which the kernel frees when their holder dies, however it dies.

Unlike a pid, a lock means the same in every container that sees the file: pids differ between pid
namespaces.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.contract.errors import DamagedRecordError


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """Locks a file, which is created where there is none, against all other processes.

    Args:
        path: The file.
        shared: Let others have it that ask for the same.

    Returns:
        The open descriptor that holds the lock, for the caller to close; None, at once, where
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
    """Holds the lock on a file within the block; waits for it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
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


class AliveLock:
    """A lock on one file, held from :meth:`take` to :meth:`free` or to the end of this process.

    Args:
        path: The file; its parent is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Takes the lock; returns False, at once, when another holds it."""
        self._descriptor = try_lock(self._path)
        return self._descriptor is not None

    def free(self, *, remove: bool = False) -> None:
        """Gives the lock back; harmless when it is not held.

        Args:
            remove: Whether nobody will ask for this lock again.
        """
        if self._descriptor is not None:
            if remove:
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # For writing: NFS locks no file that is open for reading only.
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        # Of another user, who shares the lock.
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP):
            raise
        raise DamagedRecordError(
            f"{path} is no file for a lock: {error.strerror}", "remove it while nothing runs"
        ) from error
