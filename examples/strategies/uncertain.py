"""Pairs where several scores of a response disagree: DeltaUCB, DRTS and Thompson sampling.

    pair:
      strategy: python
      python: {function: delta_ucb, settings: {heads: one two, exploration: 1.0}}
    inputs: {strategy_code: examples/strategies/uncertain.py}

`heads` names components of the score between spaces, such as an ensemble's heads or judges' votes.
m is their mean and w is `exploration` times their standard deviation.
"""

import random
import statistics
from itertools import permutations

# Draws after which a second response that is still the first is chosen by its mean.
MOST_DRAWS = 30


def delta_ucb(responses, seed, heads, exploration=1.0):
    """The pair whose gap may be the largest: argmax of (m + w)_i − (m − w)_j (arXiv 2603.09692)."""
    means, widths = moments(responses, heads, exploration)

    def gap(pair):
        first, second = pair
        return means[first] + widths[first] - means[second] + widths[second]

    return max(permutations(range(len(means)), 2), key=gap)


def drts(responses, seed, heads, exploration=1.0):
    """The best under one draw of N(m, w²) against the worst under another (arXiv 2603.09692)."""
    return drawn_pair(responses, seed, heads, exploration, min)


def thompson(responses, seed, heads, exploration=1.0):
    """The best under one draw of N(m, w²) against the best under another (arXiv 2411.01493)."""
    return drawn_pair(responses, seed, heads, exploration, max)


def drawn_pair(responses, seed, heads, exploration, extreme):
    """The best response of one draw, and the extreme one of a later draw that is another."""
    means, widths = moments(responses, heads, exploration)
    places = range(len(means))
    generator = random.Random(seed)

    def draw(choose):
        values = [generator.gauss(mean, width) for mean, width in zip(means, widths, strict=True)]
        return choose(places, key=lambda place: (values[place], -place))

    first = draw(max)
    for _ in range(MOST_DRAWS):
        second = draw(extreme)
        if second != first:
            return first, second
    others = [place for place in places if place != first]
    return first, extreme(others, key=lambda place: (means[place], -place))


def moments(responses, heads, exploration):
    """Mean and width of each response's heads."""
    scores = [[response["components"][head] for head in heads.split()] for response in responses]
    means = [statistics.fmean(row) for row in scores]
    widths = [exploration * statistics.pstdev(row) for row in scores]
    return means, widths
