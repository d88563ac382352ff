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
    """A prompt ready to be continued."""

    token_ids: list[int]
    seeds: list[int]
    """One seed for each of its K responses."""
    chunk: int = 0
    """First prompt of the chunk that it belongs to, see :mod:`stages.generate.filling`."""


@dataclass(frozen=True)
class Sample:
    """One response."""

    token_ids: list[int]
    """As drawn, the stop token included if one was drawn."""
    logprobs: list[float]
    """log π of each of them at temperature 1, before top-p; NaN if not known."""
    finish_reason: str
    """``stop`` or ``length``."""


class Backend(Protocol):
    """An engine with a policy loaded, made by its module's ``load(policy, params, events)``."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """Facts about the engine for the manifest."""

    def generate(self, prompts: Iterator[Prompt]) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed; called once.

        Args:
            prompts: Taken as the engine has room for them.

        Yields:
            (number of the prompt, sample index, response), in the order in which they are done. A
            response depends on its prompt and seed, not on what else is asked for.
        """

    def close(self) -> None:
        """Frees the engine's memory and ends its processes."""
