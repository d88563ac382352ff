"""Choice of the two responses of a prompt to compare. Pure.

To add a strategy: one function, one row in ``STRATEGIES`` or ``UNCERTAIN``, its name in ``params``;
the tests run over the tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, permutations
from random import Random

Selection = tuple[int, int]
"""Indices of the chosen and of the rejected response."""


def best_worst(scores: Sequence[float], seed: int) -> Selection:
    """The best against the worst; if all tie, the first against the last."""
    return _best(scores), _worst(scores)


def best_random(scores: Sequence[float], seed: int) -> Selection:
    """The best against any other."""
    best = _best(scores)
    other = seed % (len(scores) - 1)
    return best, other + (other >= best)


def random(scores: Sequence[float], seed: int) -> Selection:
    """Any two, each pair as likely as the others."""
    first = seed % len(scores)
    second = seed // len(scores) % (len(scores) - 1)
    second += second >= first
    return ranked(scores, min(first, second), max(first, second))


def first_two(scores: Sequence[float], seed: int) -> Selection:
    """The first two samples: a pair drawn from the policy, whatever K is."""
    return ranked(scores, 0, 1)


def delta_ucb(means: Sequence[float], widths: Sequence[float], seed: int) -> Selection:
    """The pair whose gap may be the largest: argmax of (m + w)_i − (m − w)_j, i ≠ j."""
    return max(
        permutations(range(len(means)), 2),
        key=lambda pair: means[pair[0]] + widths[pair[0]] - means[pair[1]] + widths[pair[1]],
    )


def drts(means: Sequence[float], widths: Sequence[float], seed: int) -> Selection:
    """The best under one draw of N(m, w²) against the worst under further draws."""
    draws = _draws(means, widths, seed)
    return _two_of(_best(next(draws)), map(_worst, draws), means, _worst)


def thompson(means: Sequence[float], widths: Sequence[float], seed: int) -> Selection:
    """The best under one draw of N(m, w²) against the best under further draws."""
    draws = _draws(means, widths, seed)
    return _two_of(_best(next(draws)), map(_best, draws), means, _best)


_MOST_DRAWS = 30
"""Draws after which a second response that is still the first is chosen by its mean."""


def _draws(means: Sequence[float], widths: Sequence[float], seed: int) -> Iterator[Sequence[float]]:
    random = Random(seed)
    while True:
        yield [random.gauss(mean, width) for mean, width in zip(means, widths, strict=True)]


def _two_of(
    first: int,
    others: Iterator[int],
    means: Sequence[float],
    by_mean: Callable[[Sequence[float]], int],
) -> Selection:
    """The first, and the next of the others that is not the first."""
    for other in islice(others, _MOST_DRAWS):
        if other != first:
            return first, other
    left = [place for place in range(len(means)) if place != first]
    return first, left[by_mean([means[place] for place in left])]


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda index: (scores[index], -index))


def _worst(scores: Sequence[float]) -> int:
    return min(range(len(scores)), key=lambda index: (scores[index], -index))


def ranked(scores: Sequence[float], first: int, second: int) -> Selection:
    """The two in order of score; at a tie the earlier sample stands in the chosen place."""
    return (second, first) if scores[second] > scores[first] else (first, second)


STRATEGIES: Mapping[str, Callable[[Sequence[float], int], Selection]] = {
    "best_worst": best_worst,
    "best_random": best_random,
    "random": random,
    "first_two": first_two,
}
"""From the K ≥ 2 scores of a prompt and a seed in [0, 2^63) to the pair."""

UNCERTAIN: Mapping[str, Callable[[Sequence[float], Sequence[float], int], Selection]] = {
    "delta_ucb": delta_ucb,
    "drts": drts,
    "thompson": thompson,
}
"""From means and widths of the K scores and a seed to two different places."""
