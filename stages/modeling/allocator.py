"""Settings of the C library's allocator for processes that gather and free large tensors."""

from __future__ import annotations

import ctypes
import os

PIECE_BYTES = 1 << 20
"""Pieces of at least this size go back to the system as soon as they are freed."""
# Of glibc's malloc.h, with the variable and the tunable by which a person sets the same.
_SETTINGS = (
    (-3, PIECE_BYTES, "MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold"),
    (-1, PIECE_BYTES, "MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold"),
    (-8, 2, "MALLOC_ARENA_MAX", "glibc.malloc.arena_max"),
)


def give_back_freed_memory() -> None:
    """Has freed tensors go back to the system at once; best called before there are threads.

    glibc raises its threshold to 32 MiB with the pieces that it sees freed, and keeps smaller ones
    for later: hundreds of MiB where layers of a model are gathered and freed one after the other.
    What the person who started this process has set is left alone. Other C libraries are not asked.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for parameter, value, variable, tunable in _SETTINGS:
        if variable not in os.environ and f"{tunable}=" not in tunables:
            mallopt(parameter, value)
