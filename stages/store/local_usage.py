"""Space used in a store's folder, for garbage collection."""

import contextlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HeldKind = Literal["artifact", "work", "scratch", "aside"]


@dataclass(frozen=True)
class Held:
    """A file or folder in the store, with its size.

    Attributes:
        kind: An artifact, the state of an attempt, what a killed one left, or what was set aside.
        stage: Its stage, and ``key`` its key; empty if unknown.
        place: Where it is, below the store's root.
    """

    kind: HeldKind
    stage: str
    key: str
    place: str
    bytes: int


def bytes_below(path: Path) -> int:
    """Bytes of a file, or of all files of a folder.

    Files that are removed meanwhile do not count.
    """
    total = 0
    for file in (path,) if path.is_symlink() else (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = file.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
