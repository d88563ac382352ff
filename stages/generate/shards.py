"""Which prompts a shard works on."""

from __future__ import annotations


def shard_bounds(num_rows: int, shard_index: int, num_shards: int) -> tuple[int, int]:
    """First row of a shard and the one after its last.

    Shards are contiguous, their sizes differ by at most one, and together they are all rows.

    >>> [shard_bounds(10, index, 3) for index in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return (
        num_rows * shard_index // num_shards,
        num_rows * (shard_index + 1) // num_shards,
    )
