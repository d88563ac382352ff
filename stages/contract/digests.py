"""Digests and the canonical JSON that they are taken of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError

_CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> str:
    """Serialises ``value`` so that equal values give equal text on every machine.

    Raises:
        ValueError: ``value`` holds NaN or infinity, or something that JSON does not know.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except TypeError as error:
        raise ValueError(f"cannot be serialised stably: {error}") from error


def sha256_of(value: Any) -> str:
    """Digest of a JSON value, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Digest of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_tree(files: Mapping[str, str]) -> str:
    """Digest of several files from their relative names and own digests."""
    return sha256_of(sorted(files.items()))


def files_of(place: Path) -> list[Path]:
    """The files of a folder that make up its digest: those not hidden nor in a hidden folder."""
    return [
        each
        for each in sorted(place.rglob("*"))
        if each.is_file()
        and not any(part.startswith(".") for part in each.relative_to(place).parts)
    ]


def digest_of(place: Path) -> str:
    """Digest of a file's bytes, or of all files of a folder that are not hidden.

    Raises:
        UserError: The folder holds no such file, or the place is neither a file nor a folder.
    """
    if place.is_file():
        return sha256_file(place)
    if not place.is_dir():
        raise UserError(
            f"{place} is neither a file nor a folder", "name a checkpoint or a data file"
        )
    files = {each.relative_to(place).as_posix(): sha256_file(each) for each in files_of(place)}
    if not files:
        raise UserError(f"{place} is an empty folder", "name a checkpoint or a data file")
    return sha256_tree(files)


def state_of(place: Path) -> str:
    """Digest of names, sizes and times of modification of the files that :func:`digest_of` reads.

    It is the same as long as nobody writes into them.
    """
    files = [place] if place.is_file() else files_of(place)
    stats = ((each.relative_to(place).as_posix(), each.stat()) for each in files)
    return sha256_of([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2^63) for one purpose of a run, independent of those for its other purposes."""
    text = canonical_json([seed, *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def prompt_id(messages: list[dict[str, str]]) -> str:
    """Identity of a prompt: the first 32 digits of the digest of its messages."""
    pairs = [[message["role"], message["content"]] for message in messages]
    return sha256_of(pairs)[:32]
