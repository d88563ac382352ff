"""What the stage asks of an engine that samples responses.

Shapes: ``K`` responses per prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to be continued.

    Attributes:
        token_ids: The rendered prompt.
        seeds: One seed for each of its K responses.
    """

    token_ids: list[int]
    seeds: list[int]


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        token_ids: As drawn, the stop token included where one was drawn.
        logprobs: log π of each of them at temperature 1, before top-p.
        finish_reason: ``stop`` or ``length``.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Backend(Protocol):
    """An engine with a policy loaded. One file per implementation."""

    def generate(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed.

        Yields:
            (index in ``prompts``, sample index, response), in whatever order they are done. A
            response depends on its prompt and seed, not on what else is asked for.
        """
        ...

    def close(self) -> None:
        """Frees the engine's memory and ends its processes."""
        ...
