"""Tensors in files without a name: memory that the system can take back by writing it to disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stages.contract.disk import explain_disk_errors

Place = Callable[[Sequence[int], torch.dtype], Tensor]
"""Gives an uninitialised tensor of a shape and dtype."""


def in_files(folder: Path) -> Place:
    """Places tensors in files of a folder; each file goes with its tensor.

    A checkpoint is put together so where only one process writes it: its memory then holds no more
    than those of the others.

    Args:
        folder: On a disk with room for what is placed; calls raise :class:`UserError` without.
    """

    def place(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        try:
            flat = new_file(Path(name), size, dtype)
        finally:
            Path(name).unlink()
        return flat.view(tuple(shape))

    return place


def new_file(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """Maps a file of its own for a number of values, which are zero: a tensor of one dimension.

    Args:
        path: The file; one that is there is written over.
        size: Number of values, at least one.
        dtype: Their type.

    Raises:
        UserError: The disk has no room for them, or cannot be written.
    """
    with explain_disk_errors(path), path.open("wb") as file:
        # Room is taken now: a disk found full while memory is written ends the process by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype)
