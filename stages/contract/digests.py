"""Digests of values, files and folders."""

import hashlib
import json
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from stages.contract.errors import UserError

# Files that are read or sent at once; hashlib frees the interpreter meanwhile.
_THREADS = 8

T = TypeVar("T")
R = TypeVar("R")


def canonical_json(value: Any) -> str:
    """Serialises ``value`` so that equal values give equal text on every machine.

    Raises:
        ValueError: ``value`` holds NaN or infinity.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def sha256_of(value: Any) -> str:
    """Digest of a JSON value, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Digest of a file's bytes, read in chunks."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        # An error of reading does not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def in_threads(act: Callable[[T], R], items: Collection[T]) -> dict[T, R]:
    """Results by item, for several items (files) of which some are worked on at once."""
    pool = ThreadPoolExecutor(_THREADS)
    try:
        futures = {item: pool.submit(act, item) for item in items}
        for future in as_completed(futures.values()):
            future.result()
        return {item: future.result() for item, future in futures.items()}
    finally:
        # After a failure, or when the stage is asked to stop, no other item begins.
        pool.shutdown(cancel_futures=True)


def sha256_tree(files: Mapping[str, str]) -> str:
    """Digest of several files from their relative names and own digests."""
    return sha256_of(sorted(files.items()))


def files_of(path: Path) -> list[Path]:
    """The files of a folder that make up its digest: those not hidden nor in a hidden folder.

    Raises:
        UserError: One is a link to no file: the folder would pass for a whole one without it.
    """
    entries = [
        entry
        for entry in sorted(path.rglob("*"))
        if not any(part.startswith(".") for part in entry.relative_to(path).parts)
    ]
    for entry in entries:
        if entry.is_symlink() and not entry.exists():
            raise UserError(
                f"{entry} is a link to no file", "copy the folder again, or remove the link"
            )
    return [entry for entry in entries if entry.is_file()]


def files_by_name(folder: Path) -> dict[str, Path]:
    """All files below a folder, hidden ones too, by their relative names, in order."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}


def digest_of(path: Path) -> str:
    """Digest of a file's bytes, or of all files of a folder that are not hidden.

    Raises:
        UserError: The folder holds no such file, or the path is neither a file nor a folder.
    """
    if path.is_file():
        return sha256_file(path)
    if not path.is_dir():
        raise UserError(
            f"{path} is neither a file nor a folder", "name a checkpoint or a data file"
        )
    files = {file.relative_to(path).as_posix(): sha256_file(file) for file in files_of(path)}
    if not files:
        raise UserError(f"{path} is an empty folder", "name a checkpoint or a data file")
    return sha256_tree(files)


def state_of(path: Path) -> str:
    """Digest of names, sizes and times of modification of the files that :func:`digest_of` reads.

    It stays the same until something writes into them.
    """
    files = [path] if path.is_file() else files_of(path)
    stats = ((file.relative_to(path).as_posix(), file.stat()) for file in files)
    return sha256_of([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2^63) for one purpose of a run, independent of those for its other purposes."""
    text = canonical_json([seed, *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def prompt_id(messages: list[dict[str, str]]) -> str:
    """Identity of a prompt: the first 32 digits of the digest of its messages."""
    pairs = [[message["role"], message["content"]] for message in messages]
    return sha256_of(pairs)[:32]


def set_aside(path: Path) -> Path:
    """Renames a damaged file or folder, so that nothing takes it for whole; returns its path."""
    name = f"damaged-{uuid.uuid4().hex[:8]}-{path.name}"
    return path.rename(path.with_name(name))
