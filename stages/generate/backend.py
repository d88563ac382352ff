"""Interface of the engines that sample responses.

Shapes: ``K`` responses per prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt ready to be continued."""

    token_ids: list[int]
    seeds: list[int]
    """One seed for each of its K responses."""


@dataclass(frozen=True)
class SampledResponse:
    """One response."""

    token_ids: list[int]
    """As drawn, the stop token included if one was drawn."""
    logprobs: list[float]
    """log π of each of them at temperature 1, before top-p."""
    finish_reason: str
    """``stop`` or ``length``."""


class Backend(Protocol):
    """An engine with a policy loaded, made by its module's ``load(policy, params, events)``."""

    def generate(
        self, prompts: Sequence[EncodedPrompt], held: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[tuple[int, int, SampledResponse]]:
        """Continues every prompt once per seed.

        An earlier attempt has drawn the samples ``held``, by the numbers of their prompts.

        Yields:
            (number of the prompt, sample index, response), in the order in which they are done.
        """

    def close(self) -> None:
        """Frees the engine's memory and ends its processes."""
