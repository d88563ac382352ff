"""Units of sampling: prompts that one engine works on, dealt out so that results do not change.

Shapes: ``K`` responses per prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from stages.generate.backend import Prompt
from stages.generate.params import GenerateParams

# Number of a prompt in the stream of all, and sample index.
Place = tuple[int, int]

# Prompts of a unit for an engine that works on a stream: few, so that engines end together.
_STREAM_PROMPTS = 4


@dataclass(frozen=True)
class Unit:
    """Prompts, with the seeds that are wanted of each.

    Attributes:
        numbers: Number of each prompt in the stream of all.
        samples: Sample index of each of its seeds.
        prompts: The prompts.
    """

    numbers: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...]
    prompts: tuple[Prompt, ...]

    def place(self, index: int, seed: int) -> Place:
        """Place of the response to the ``seed``-th seed of a prompt here."""
        return self.numbers[index], self.samples[index][seed]

    @property
    def places(self) -> list[Place]:
        """Places of all its responses."""
        pairs = zip(self.numbers, self.samples, strict=True)
        return [(number, sample) for number, samples in pairs for sample in samples]


def takes_stream(params: GenerateParams) -> bool:
    """True for an engine that works on prompts of several units at once."""
    return params.backend != "transformers"


def split_units(prompts: Iterable[Prompt], params: GenerateParams) -> Iterator[Unit]:
    """Deals prompts out to engines.

    A unit for transformers is a batch that one engine alone would form, so that the number of
    engines changes no byte; vLLM forms its batches from what it has.
    """
    if takes_stream(params):
        return _stream(prompts)
    return _batches(prompts, params.transformers.batch_size)


def split_batches(prompts: Sequence[Prompt], size: int) -> list[list[tuple[int, int]]]:
    """Batches of rows (prompt index, seed index) of about the same length, the longest first.

    Args:
        prompts: The prompts of a chunk.
        size: Rows of a batch.
    """
    rows = [(index, seed) for index, each in enumerate(prompts) for seed in range(len(each.seeds))]
    rows.sort(key=lambda row: -len(prompts[row[0]].token_ids))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _batches(prompts: Iterable[Prompt], size: int) -> Iterator[Unit]:
    for _, chunk in groupby(enumerate(prompts), key=lambda each: each[1].chunk):
        numbered = list(chunk)
        for rows in split_batches([prompt for _, prompt in numbered], size):
            # Rows of a prompt follow each other: they have the same length, and sorting is stable.
            groups = [
                (*numbered[index], [seed for _, seed in group])
                for index, group in groupby(rows, key=lambda row: row[0])
            ]
            yield _unit(groups)


def _stream(prompts: Iterable[Prompt]) -> Iterator[Unit]:
    numbered = enumerate(prompts)
    while group := list(islice(numbered, _STREAM_PROMPTS)):
        yield _unit((number, prompt, range(len(prompt.seeds))) for number, prompt in group)


def _unit(groups: Iterable[tuple[int, Prompt, Sequence[int]]]) -> Unit:
    numbers, prompts, samples = [], [], []
    for number, prompt, seeds in groups:
        numbers.append(number)
        samples.append(tuple(seeds))
        prompts.append(replace(prompt, seeds=[prompt.seeds[seed] for seed in seeds]))
    return Unit(tuple(numbers), tuple(samples), tuple(prompts))
