"""Batches of sequences of like length."""

from collections.abc import Iterator, Sequence


def token_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Groups sequences by length so that a padded batch stays within a token budget.

    A longer sequence gets a batch to itself.

    Yields:
        Indices of the sequences of a batch, longest first: what does not fit in memory shows at
        once, and little is padded.

    >>> list(token_batches([3, 9, 4, 2], 8))
    [[1], [2, 0], [3]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size
