"""Mid-training checkpoints in the work folder: there whole, or not at all.

One is written under a temporary name, fsynced and renamed; the one before it goes only then.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")


def last_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """The newest whole checkpoint and its step."""
    if not folder.is_dir():
        return None
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return max(found, default=None)


def publish_checkpoint(written: Path, folder: Path) -> Path:
    """Moves a written checkpoint into ``folder`` and removes older ones.

    Args:
        written: The checkpoint, named ``checkpoint-<step>``, on the file system of ``folder``.
        folder: Where whole checkpoints are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*written.rglob("*"), written]:
        _fsync(path)
    target = folder / written.name
    older = [path for path in folder.iterdir() if path != target]
    written.rename(target)
    _fsync(folder)
    for path in older:
        shutil.rmtree(path)
    return target


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
