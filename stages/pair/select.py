"""Choice of the two responses of a prompt to compare. Pure.

To add a strategy: one function, one row in ``STRATEGIES``, its name in ``params``; the tests run
over the table.
"""

from collections.abc import Callable, Mapping, Sequence

Selection = tuple[int, int]
"""Indices of the chosen and of the rejected response."""


def best_worst(scores: Sequence[float], seed: int) -> Selection:
    """The best against the worst; if all tie, the first against the last."""
    worst = min(reversed(range(len(scores))), key=scores.__getitem__)
    return _best(scores), worst


def best_random(scores: Sequence[float], seed: int) -> Selection:
    """The best against any other."""
    best = _best(scores)
    other = seed % (len(scores) - 1)
    return best, other + (other >= best)


def first_two(scores: Sequence[float], seed: int) -> Selection:
    """The first two samples: a pair drawn from the policy, whatever K is."""
    return ranked(scores, 0, 1)


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def ranked(scores: Sequence[float], first: int, second: int) -> Selection:
    """The two in order of score; at a tie the earlier sample is the chosen one."""
    return (second, first) if scores[second] > scores[first] else (first, second)


STRATEGIES: Mapping[str, Callable[[Sequence[float], int], Selection]] = {
    "best_worst": best_worst,
    "best_random": best_random,
    "first_two": first_two,
}
"""From the K ≥ 2 scores of a prompt and a seed in [0, 2^63) to the pair."""
