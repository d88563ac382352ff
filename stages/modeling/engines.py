"""Errors of models and engines: want of memory, and break-downs that a retry may cure."""

from __future__ import annotations

from stages.contract.errors import GebError

_OUT_OF_MEMORY = (
    "out of memory",
    "allocate memory",
    "memory for the cache blocks",
    "memory on device",
    "available memory",
    "kv cache",
    "kv-cache",
)

# torch has no class of its own for the CPU's.
_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


class EngineError(GebError):
    """An engine did not start or broke down; a retry may find more memory free."""


def engine_error(engine: str, error: BaseException, remedy: str) -> EngineError:
    """The error to raise for one of an engine's own.

    Args:
        engine: Its name.
        error: What it raised.
        remedy: Which settings to lower where memory is short.
    """
    text = f"{type(error).__name__}: {error}".strip()
    first = text.splitlines()[0][:500]
    if tells_of_memory(error):
        return EngineError(f"{engine} has not enough memory ({first}); {remedy}")
    return EngineError(f"{engine} broke down ({first}); if a worker ran out of memory, {remedy}")


def tells_of_memory(error: BaseException) -> bool:
    """True if an engine's error is about memory, whatever its class."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY)


def is_out_of_memory(error: BaseException) -> bool:
    """True where an exception says that memory, of a GPU or of the machine, ran out."""
    import torch

    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or _CPU_MESSAGE in str(error)
