"""Space used in a store's folder, for garbage collection."""

import contextlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.contract.errors import StoreError

Kind = Literal["artifact", "work", "scratch", "aside", "temporary"]


@dataclass(frozen=True)
class Held:
    """Something that takes room in a store.

    Attributes:
        kind: An artifact, the state of an attempt, what a killed one left, what was set aside, or a
            record that was being written when its writer died.
        stage: Its stage, and ``key`` its key; empty if nobody knows.
        place: Where it is, below the store's root.
        written: When something in it was last written, in seconds since the epoch.
    """

    kind: Kind
    stage: str
    key: str
    place: str
    bytes: int
    written: float


def names_in(folder: Path) -> list[str]:
    """Names in a folder, in order; none if there is no folder.

    Raises:
        StoreError: It cannot be read: a store that seems empty would pass for whole.
    """
    try:
        return sorted(each.name for each in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be read: {error.strerror}. Check its permissions"
        ) from error


def files_below(folder: Path) -> Iterator[Path]:
    """All files and links below a folder, in order; see :func:`names_in`."""
    for path in (folder / name for name in names_in(folder)):
        if path.is_dir() and not path.is_symlink():
            yield from files_below(path)
        else:
            yield path


def usage_below(path: Path) -> tuple[int, float]:
    """Bytes of a file, or of all files of a folder, and when something in it was last written.

    What goes meanwhile does not count.
    """
    total = 0
    written = 0.0
    for each in (path,) if path.is_symlink() else (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = each.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
            written = max(written, status.st_mtime)
    return total, written
