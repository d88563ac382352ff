"""Digests of what a work folder keeps between attempts, so that damage is noticed before use.

A file has its digest beside it (``.<name>.sha256``), a folder lists those of its files in
``digests.json``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from stages.contract.atomic import atomic_path, write_atomically
from stages.contract.digests import sha256_file
from stages.contract.errors import DamagedArtifactError

DIGESTS = "digests.json"
# Files that are hashed at once; hashlib frees the interpreter meanwhile.
_THREADS = 8


@contextmanager
def sealed_path(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside ``path``; the whole file appears there, with its digest.

    A kill leaves the file before or the file after, and a digest that fits it.

    Raises:
        UserError: The disk is full, or the folder cannot be written.
    """
    with atomic_path(path, durable=True) as scratch:
        yield scratch
        # A kill before the rename leaves the file before: its digest counts until then.
        accepted = [sha256_file(each) for each in (scratch, path) if each.exists()]
        write_atomically(_seal(path), "\n".join(accepted), durable=True)


def find_whole(path: Path, warn: Callable[[str], None]) -> bool:
    """True where a file written by :func:`sealed_path` is there, as it was written.

    A damaged one is set aside in its folder, and ``warn`` is told.
    """
    if not path.exists():
        return False
    try:
        if sha256_file(path) in _accepted(path):
            return True
        damage = "its content is not what was written"
    except OSError as error:
        damage = f"it cannot be read: {error.strerror}"
    aside = set_aside(path)
    warn(f"damaged file {path}: {damage}. Set aside as {aside.name}.")
    return False


def seal_folder(folder: Path) -> None:
    """Lists the digests of a folder's files; those that it lists already are not read again."""
    known = _listed(folder) if (folder / DIGESTS).exists() else {}
    added = [name for name in _files(folder) if name not in known]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(sha256_file, (folder / name for name in added))
        listed = known | dict(zip(added, digests, strict=True))
    write_atomically(folder / DIGESTS, json.dumps(listed, indent=2, sort_keys=True), durable=True)


def is_sealed(folder: Path, name: str) -> bool:
    """True where a folder lists a file."""
    return name in _listed(folder)


def check_folder(folder: Path) -> None:
    """Hashes every file that a folder lists.

    Raises:
        DamagedArtifactError: One is missing, unreadable or differs, or there is no list.
    """

    def damage(name: str, expected: str) -> str | None:
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        return None if found == expected else f"the content of {folder / name} has changed"

    listed = _listed(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = [each for each in pool.map(damage, listed, listed.values()) if each is not None]
    if found:
        raise DamagedArtifactError(f"damaged checkpoint: {'; '.join(found[:5])}")


def set_aside(path: Path) -> Path:
    """Renames a damaged file or folder, so that nothing takes it for whole; returns its place."""
    return path.rename(path.with_name(f"damaged-{uuid.uuid4().hex[:8]}-{path.name}"))


def _listed(folder: Path) -> dict[str, str]:
    path = folder / DIGESTS
    try:
        listed = json.loads(path.read_bytes())
        if not isinstance(listed, dict) or not all(
            isinstance(each, str) for each in listed.values()
        ):
            raise ValueError("no mapping")
    except (OSError, ValueError) as error:
        raise DamagedArtifactError(
            f"damaged checkpoint: {path} is missing or unreadable"
        ) from error
    return listed


def _files(folder: Path) -> list[str]:
    return [
        name
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := path.relative_to(folder).as_posix()) != DIGESTS
    ]


def _seal(path: Path) -> Path:
    return path.with_name(f".{path.name}.sha256")


def _accepted(path: Path) -> list[str]:
    """Digests that a file may have: its own, and that of the one before it."""
    try:
        return _seal(path).read_bytes().decode(errors="replace").split()
    except OSError:
        return []
