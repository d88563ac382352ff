"""Out-of-memory errors of torch and of Python, told from others."""

from __future__ import annotations

# torch has no class of its own for the CPU's.
_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """True where an exception says that memory, of a GPU or of the machine, ran out."""
    import torch

    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or _CPU_MESSAGE in str(error)
