"""Atomic writes: a file appears under its name whole, or not at all."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.contract.disk import explain_disk_errors

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")


@contextmanager
def atomic_path(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a temporary name beside ``path``, which is renamed to it when the block ends well.

    A reader sees the file before or the file after. On an error the temporary file is removed.

    Args:
        path: File to write; its folder is created.
        durable: Whether the file outlives a loss of power: content and name are synced to disk.

    Raises:
        UserError: The disk is full, or the folder cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
            if durable:
                fsync(scratch)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        if durable:
            fsync(path.parent)


def is_temporary(path: Path) -> bool:
    """True for a name that :func:`atomic_path` made."""
    return _TEMPORARY.fullmatch(path.name) is not None


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Writes a small file; see :func:`atomic_path`."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path, durable=durable) as scratch:
        scratch.write_bytes(data)


def fsync(path: Path) -> None:
    """Brings a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
