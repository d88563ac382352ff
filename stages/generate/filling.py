"""Writer of chunks: feeds prompts to a backend and writes each chunk once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from stages.generate.backend import Prompt, Sample
from stages.tables.schemas import PROMPTS, RESPONSES, publish_table

Row = Mapping[str, Any]
Render = Callable[[Row], Prompt | None]


@dataclass
class _Open:
    """A chunk in work: its prompts that fit the context, and their responses so far."""

    chunk: Chunk
    rows: list[Row] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    num_wanted: int = 0
    is_read: bool = False


@dataclass
class ChunkFiller:
    """Feeds the prompts of some chunks to a backend and writes each chunk when it is complete.

    The backend sees one stream, so that it is not idle at the end of a chunk while the longest
    responses are finished. Memory holds the chunks in work only.
    """

    chunks: Sequence[Chunk]
    rows: Iterator[Row]
    """The rows of the prompts table from its beginning."""
    render: Render
    """A row's prompt, or None to leave the row out."""
    decode: Callable[[list[int]], str]
    """The text of a response."""
    on_written: Callable[[Chunk], None]
    _places: dict[int, tuple[_Open, int]] = field(default_factory=dict)

    def prompts(self) -> Iterator[Prompt]:
        """Yields the prompts, each to be answered by :meth:`take` under its number from 0."""
        number = position = 0
        for chunk in self.chunks:
            work = _Open(chunk)
            for row in islice(self.rows, chunk.first - position, chunk.stop - position):
                prompt = self.render(row)
                if prompt is None:
                    continue
                self._places[number] = work, len(work.prompts)
                work.rows.append(row)
                prompt = replace(prompt, chunk=chunk.first)
                work.prompts.append(prompt)
                work.num_wanted += len(prompt.seeds)
                number += 1
                yield prompt
            position = chunk.stop
            work.is_read = True
            self._write_if_complete(work)

    def take(self, number: int, sample_index: int, sample: Sample) -> None:
        """Keeps a response to the prompt with a number."""
        work, place = self._places[number]
        work.samples[place, sample_index] = sample
        self._write_if_complete(work)

    def _write_if_complete(self, work: _Open) -> None:
        if not work.is_read or len(work.samples) < work.num_wanted:
            return
        for number in [key for key, (each, _) in self._places.items() if each is work]:
            del self._places[number]
        # A kill leaves all rows or none.
        publish_table(work.chunk.path, RESPONSES, self._to_rows(work))
        self.on_written(work.chunk)

    def _to_rows(self, work: _Open) -> Iterator[dict[str, Any]]:
        for place, (row, prompt) in enumerate(zip(work.rows, work.prompts, strict=True)):
            for sample_index, seed in enumerate(prompt.seeds):
                sample = work.samples[place, sample_index]
                yield {
                    **{name: row[name] for name in PROMPTS.names},
                    "sample_index": sample_index,
                    "prompt_token_ids": prompt.token_ids,
                    "response_token_ids": sample.token_ids,
                    "response_logprobs": sample.logprobs,
                    "response": self.decode(sample.token_ids),
                    "finish_reason": sample.finish_reason,
                    "seed": seed,
                }


@dataclass(frozen=True)
class Chunk:
    """The responses to the prompts from ``first`` to before ``stop`` of the prompts table.

    The file's name holds the bounds, so that chunks of another size, left by an attempt with other
    settings of speed, are never taken for these.
    """

    first: int
    stop: int
    path: Path

    def __len__(self) -> int:
        return self.stop - self.first


def split_chunks(folder: Path, start: int, stop: int, size: int) -> list[Chunk]:
    """The chunks of at most ``size`` prompts that make up a shard, in order."""
    bounds = [(first, min(first + size, stop)) for first in range(start, stop, size)]
    return [
        Chunk(first, last, folder / f"{first:09d}-{last:09d}.parquet") for first, last in bounds
    ]
