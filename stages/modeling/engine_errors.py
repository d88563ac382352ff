"""Errors of models and engines: lack of memory, and failures that a retry may cure."""

import torch

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


class EngineError(GebError):
    """An engine did not start or broke down; a retry may find more memory free."""


def engine_error(engine: str, error: BaseException, remedy: str) -> EngineError:
    """The error to raise for one of an engine's own."""
    text = f"{type(error).__name__}: {error}".strip()
    first = text.splitlines()[0][:500]
    return EngineError(f"{engine} broke down ({first}); if memory ran out, {remedy}")


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory, of a GPU or of the machine, ran out."""
    # torch has no class for the CPU's, and engines have none for a GPU's.
    is_said = any(part in str(error).lower() for part in _OUT_OF_MEMORY)
    return is_said or isinstance(error, torch.OutOfMemoryError | MemoryError)
