"""Mid-training checkpoints in the work folder: there whole, or not at all.

One is written under a temporary name, fsynced and renamed; the one before it goes only then.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE_FILE = "geb_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        step: Steps done.
        path: Its folder.
        state: What this project keeps beside the Trainer's own files.
    """

    step: int
    path: Path
    state: dict[str, Any]


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint."""
    if not folder.is_dir():
        return None
    found = [
        (int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    if not found:
        return None
    step, path = max(found)
    return Checkpoint(step, path, json.loads((path / STATE_FILE).read_text()))


def publish_checkpoint(written: Path, state: dict[str, Any], folder: Path) -> Path:
    """Moves a written checkpoint into ``folder`` and removes older ones.

    Args:
        written: The checkpoint, named ``checkpoint-<step>``, on the file system of ``folder``.
        state: Kept beside the Trainer's own files.
        folder: Where whole checkpoints are.
    """
    (written / STATE_FILE).write_text(json.dumps(state))
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
