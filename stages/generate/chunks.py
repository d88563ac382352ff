"""Chunks of a shard's responses: one file for each run of prompts, there whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract.sealed import find_whole
from stages.contract.tables import RESPONSES, publish_table


@dataclass(frozen=True)
class Chunk:
    """The responses to some consecutive prompts.

    The file's name holds the bounds, so that chunks of another size, left by an attempt with other
    settings of speed, are never taken for these.

    Attributes:
        first: Index of the first prompt in the prompts table.
        stop: The index after the last one.
        path: File of the responses.
    """

    first: int
    stop: int
    path: Path

    def __len__(self) -> int:
        return self.stop - self.first

    def is_written(self, warn: Callable[[str], None]) -> bool:
        """True once an attempt has finished this chunk; ``warn`` is told of a damaged one."""
        return find_whole(self.path, warn)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the chunk's rows of RESPONSES; a kill leaves all of them or none."""
        publish_table(self.path, RESPONSES, rows)


def split_chunks(folder: Path, start: int, stop: int, size: int) -> list[Chunk]:
    """The chunks of at most ``size`` prompts that make up a shard, in order."""
    bounds = [(first, min(first + size, stop)) for first in range(start, stop, size)]
    return [
        Chunk(first, last, folder / f"{first:09d}-{last:09d}.parquet") for first, last in bounds
    ]
