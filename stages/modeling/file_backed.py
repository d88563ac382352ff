"""Tensors in files without a name: memory that the system can take back by writing it to disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

Place = Callable[[Sequence[int], torch.dtype], Tensor]
"""Gives an uninitialised tensor of a shape and dtype."""


def in_files(folder: Path) -> Place:
    """Places tensors in files of a folder; each file goes with its tensor.

    A checkpoint is put together so where only one process writes it: its memory then holds no more
    than those of the others.

    Args:
        folder: On a disk with room for what is placed.
    """

    def place(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        if size == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        try:
            flat = torch.from_file(name, shared=True, size=size, dtype=dtype)
        finally:
            Path(name).unlink()
        return flat.view(tuple(shape))

    return place
