"""Writer of chunks: feeds prompts to a backend and writes each chunk once it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from stages.generate.backend import Prompt, Sample
from stages.generate.chunks import Chunk

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


class ChunkFiller:
    """Feeds the prompts of some chunks to a backend and writes each chunk when it is complete.

    The backend sees one stream, so that it is not idle at the end of a chunk while the longest
    responses are finished. Memory holds the chunks in work only.

    Args:
        chunks: What is to be done, in order.
        rows: The rows of the prompts table from its beginning.
        render: A row's prompt, or None to leave the row out.
        decode: The text of a response.
        on_written: Called with each chunk that is written.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        rows: Iterator[Row],
        render: Render,
        decode: Callable[[list[int]], str],
        on_written: Callable[[Chunk], None],
    ) -> None:
        self._chunks = chunks
        self._rows = rows
        self._render = render
        self._decode = decode
        self._on_written = on_written
        self._places: dict[int, tuple[_Open, int]] = {}

    def prompts(self) -> Iterator[Prompt]:
        """Yields the prompts, each to be answered by :meth:`take` under its number from 0."""
        number = position = 0
        for chunk in self._chunks:
            work = _Open(chunk)
            for row in islice(self._rows, chunk.first - position, chunk.stop - position):
                prompt = self._render(row)
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
        work.chunk.write(self._to_rows(work))
        self._on_written(work.chunk)

    def _to_rows(self, work: _Open) -> Iterator[dict[str, Any]]:
        for place, (row, prompt) in enumerate(zip(work.rows, work.prompts, strict=True)):
            for sample_index, seed in enumerate(prompt.seeds):
                sample = work.samples[place, sample_index]
                yield {
                    "prompt_id": row["prompt_id"],
                    "sample_index": sample_index,
                    "messages": row["messages"],
                    "reference_answer": row["reference_answer"],
                    "prompt_token_ids": prompt.token_ids,
                    "response_token_ids": sample.token_ids,
                    "response_logprobs": sample.logprobs,
                    "response": self._decode(sample.token_ids),
                    "finish_reason": sample.finish_reason,
                    "seed": seed,
                }
