"""Contents of a store's folders; an unreadable folder is an error, a vanished file is none."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.contract.errors import StoreError


@contextmanager
def readable(place: Path) -> Iterator[None]:
    """Names a place that the block cannot read: a store that seems empty would pass for whole.

    Raises:
        StoreError: It cannot.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or place} cannot be read: {error.strerror}. Check its permissions"
        ) from error


def names_in(folder: Path) -> list[str]:
    """Names in a folder, in order; none where there is no folder."""
    try:
        return sorted(each.name for each in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder; raises where a folder cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        linked = [each for each in folders if Path(parent, each).is_symlink()]
        yield from (Path(parent, each) for each in (*names, *linked))


def usage_below(path: Path) -> tuple[int, float]:
    """Bytes of a file, or of all files of a folder, and when something in it was last written.

    What goes meanwhile does not count.
    """
    total, written = 0, 0.0
    for each in (path,) if path.is_symlink() else (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = each.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
            written = max(written, status.st_mtime)
    return total, written
