"""Space used in a store's folder, for garbage collection."""

import contextlib
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.contract.atomic import is_temporary
from stages.contract.errors import StoreError

Kind = Literal["artifact", "work", "scratch", "aside", "temporary"]


@dataclass(frozen=True)
class Held:
    """Something that takes room in a store.

    Attributes:
        kind: An artifact, the state of an attempt, what a killed one left, what was set aside, or a
            record that was being written when its writer died.
        stage: Its stage; empty if nobody knows.
        key: Its key.
        place: Where it is, below the store's root.
        bytes: Its size.
        written: When something in it was last written, in seconds since the epoch.
    """

    kind: Kind
    stage: str
    key: str
    place: str
    bytes: int
    written: float


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
        key = path.name.removeprefix(".scratch-").partition("-")[0]
        yield found("scratch", path.parent.name, key, path)
    for path in (root / "quarantine").glob("*"):
        yield found("aside", "", "", path)
    records = (path for each in _RECORDS for path in (root / each).rglob("*"))
    for path in (*root.glob("*"), *records):
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
            path = path.rename(path.with_name(f".scratch-{gone.key}-{uuid.uuid4().hex[:8]}"))
        shutil.rmtree(path)


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
    total, written = 0, 0.0
    for each in (path,) if path.is_symlink() else (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = each.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
            written = max(written, status.st_mtime)
    return total, written
