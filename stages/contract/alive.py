"""Whether a process lives, told by a file that it keeps locked.

The kernel frees the lock when the process dies, however it dies. Unlike a pid, the lock means the
same in every container that sees the file: pids differ between pid namespaces.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


class AliveLock:
    """A lock on one file, held from :meth:`take` to :meth:`free` or to the end of this process.

    Args:
        path: The file; its parent is created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def take(self) -> bool:
        """Takes the lock; returns False, at once, when another holds it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    def free(self, *, remove: bool = False) -> None:
        """Gives the lock back; harmless when it is not held.

        Args:
            remove: Whether nobody will ask for this lock again.
        """
        if self._file is not None:
            if remove:
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def is_held(path: Path) -> bool:
    """Whether some process on this machine holds the lock on a file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
