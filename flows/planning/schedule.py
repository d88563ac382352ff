"""Wall time of steps of which some run at the same time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def end_of(
    steps: Sequence[tuple[str, float]], upstream: Mapping[str, Sequence[str]], parallel: int
) -> float:
    """Seconds until the last step ends: each starts once its inputs are there and a slot is free.

    Args:
        steps: Names and seconds of the steps, inputs before those that read them.
        upstream: Names of the steps that each reads from; what is not in ``steps`` is there.
        parallel: Steps that may run at the same time.

    >>> end_of([("a", 2.0), ("b", 1.0), ("c", 1.0)], {"c": ["a"]}, parallel=2)
    3.0
    """
    ends: dict[str, float] = {}
    slots = [0.0] * parallel
    for name, seconds in steps:
        ready = max((ends[each] for each in upstream.get(name, ()) if each in ends), default=0.0)
        start = max(ready, heapq.heappop(slots))
        ends[name] = start + seconds
        heapq.heappush(slots, ends[name])
    return max(ends.values(), default=0.0)
