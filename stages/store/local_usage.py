"""Space used in a store's folder, for garbage collection."""

import contextlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["artifact", "work", "scratch", "aside"]


@dataclass(frozen=True)
class Held:
    """A file or folder in the store, with its size.

    Attributes:
        kind: An artifact, the state of an attempt, what a killed one left, or what was set aside.
        stage: Its stage, and ``key`` its key; empty if unknown.
        place: Where it is, below the store's root.
        written: When something in it was last written, in seconds since the epoch.
    """

    kind: Kind
    stage: str
    key: str
    place: str
    bytes: int
    written: float


def usage_below(path: Path) -> tuple[int, float]:
    """Bytes of a file, or of all files of a folder, and when something in it was last written.

    Files that are removed meanwhile do not count.
    """
    total = 0
    written = 0.0
    for each in (path,) if path.is_symlink() else (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = each.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
            written = max(written, status.st_mtime)
    return total, written
