"""Interface of the engines that sample responses.

Shapes: ``K`` responses per prompt.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to be continued.

    Attributes:
        token_ids: The rendered prompt.
        seeds: One seed for each of its K responses.
        chunk: First prompt of the chunk that it belongs to, see :mod:`stages.generate.filling`.
    """

    token_ids: list[int]
    seeds: list[int]
    chunk: int = 0


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        token_ids: As drawn, the stop token included if one was drawn.
        logprobs: log π of each of them at temperature 1, before top-p; NaN if not known.
        finish_reason: ``stop`` or ``length``.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Backend(Protocol):
    """An engine with a policy loaded, made by its module's ``load(policy, params, events)``."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """Facts about the engine for the manifest."""
        ...

    def generate(self, prompts: Iterator[Prompt]) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed; called once.

        Args:
            prompts: Taken as the engine has room for them.

        Yields:
            (number of the prompt, sample index, response), in the order in which they are done. A
            response depends on its prompt and seed, not on what else is asked for.
        """
        ...

    def close(self) -> None:
        """Frees the engine's memory and ends its processes."""
        ...
