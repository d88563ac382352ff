"""What the stage asks of an engine that samples responses.

Shapes: ``K`` responses per prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stages.contract.errors import GebError

STOP = "stop"
LENGTH = "length"

_OUT_OF_MEMORY = (
    "out of memory",
    "allocate memory",
    "memory for the cache blocks",
    "memory on device",
    "available memory",
    "kv cache",
    "kv-cache",
)


class EngineError(GebError):
    """An engine did not start or broke down; a retry may find more memory free."""


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to be continued.

    Attributes:
        messages: The conversation as the prompts table has it.
        token_ids: The rendered prompt.
        seeds: One seed for each of its K responses.
    """

    messages: Sequence[Mapping[str, str]]
    token_ids: list[int]
    seeds: list[int]


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        token_ids: As drawn, the stop token included where one was drawn.
        logprobs: log π of each of them at temperature 1, before top-p; NaN where not known.
        finish_reason: ``stop`` or ``length``.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Backend(Protocol):
    """An engine with a policy loaded. One file per implementation."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """Facts about the engine for the manifest."""
        ...

    def generate(self, prompts: Iterator[Prompt]) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed.

        Args:
            prompts: Taken as the engine has room for them.

        Yields:
            (number of the prompt, sample index, response), in whatever order they are done. A
            response depends on its prompt and seed, not on what else is asked for.
        """
        ...

    def close(self) -> None:
        """Frees the engine's memory and ends its processes."""
        ...


def engine_error(engine: str, error: BaseException, remedy: str) -> EngineError:
    """The error to raise for one of an engine's own.

    Args:
        engine: Its name.
        error: What it raised.
        remedy: Which settings to lower where memory is short.
    """
    text = f"{type(error).__name__}: {error}".strip()
    first = text.splitlines()[0][:500]
    if is_out_of_memory(error):
        return EngineError(f"{engine} has not enough memory ({first}); {remedy}")
    return EngineError(f"{engine} broke down ({first}); if a worker ran out of memory, {remedy}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an engine's error is about memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY)
