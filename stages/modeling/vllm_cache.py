"""How much memory vLLM takes for keys and values."""

from __future__ import annotations

# vLLM itself would take its share of a GPU's memory, nine tenths, of the host's: two stages at
# once would not start.
CPU_CACHE_GIB = 4.0


def kv_cache_gib(asked: float | None) -> float | None:
    """GiB to ask vLLM for.

    Args:
        asked: The setting ``kv_cache_gib``.

    Returns:
        None where the share of the GPU's memory decides.
    """
    from vllm.platforms import current_platform

    return CPU_CACHE_GIB if asked is None and current_platform.is_cpu() else asked


def kv_cache_bytes(asked: float | None) -> int | None:
    """The same in bytes, as vLLM takes it."""
    gib = kv_cache_gib(asked)
    return None if gib is None else int(gib * 2**30)


def cache_setting(asked: float | None, gpu_memory_utilization: float) -> str:
    """The setting to lower where memory is short, with its value."""
    gib = kv_cache_gib(asked)
    if gib is None:
        return f"gpu_memory_utilization={gpu_memory_utilization:g}"
    return f"kv_cache_gib={gib:g}"
