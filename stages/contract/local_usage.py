"""Space used in a store's folder, for garbage collection."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.contract.atomic import is_temporary
from stages.contract.errors import StoreError
from stages.contract.store import Held, Kind

# Folders of records that a process replaces as it goes.
_RECORDS = ("runs", "models", "leases")


def held(root: Path, artifacts: Iterable[tuple[str, str]]) -> Iterator[Held]:
    """Yields everything that takes room; see :meth:`Store.held`.

    Args:
        root: The store's folder.
        artifacts: (stage, key) of its artifacts.
    """

    def found(kind: Kind, stage: str, key: str, path: Path) -> Held:
        return Held(kind, stage, key, path.relative_to(root).as_posix(), *usage_below(path))

    for stage, key in artifacts:
        yield found("artifact", stage, key, root / "artifacts" / stage / key)
    for path in (root / "work").glob("*/*"):
        yield found("work", path.parent.name, path.name, path)
    for path in (root / "artifacts").glob("*/.scratch-*"):
        stage = path.parent.name
        start = path.name.removeprefix(".scratch-").partition("-")[0]
        leases = (root / "leases" / stage).glob(f"{start}*")
        key = next((each.name for each in leases if "." not in each.name), start)
        yield found("scratch", stage, key, path)
    for path in (root / "quarantine").glob("*"):
        yield found("aside", "", "", path)
    for folder in (root, *(root / each for each in _RECORDS)):
        for path in folder.glob("*" if folder == root else "**/*"):
            if is_temporary(path) and path.is_file():
                yield found("temporary", "", "", path)


def remove(root: Path, gone: Held) -> None:
    """Deletes something that :func:`held` told of; it disappears at once, or not at all."""
    path = root / gone.place
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Another collection may be at it; what both leave is found by the next one.
    with contextlib.suppress(FileNotFoundError):
        if gone.kind == "artifact":
            path = path.rename(path.with_name(f".scratch-{gone.key[:16]}-{uuid.uuid4().hex[:8]}"))
        shutil.rmtree(path)


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
