"""Strategies of `examples/strategies/uncertain.py` over means and widths."""

import runpy
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.flows.loop import ROOT

MODULE = runpy.run_path(str(ROOT / "examples/strategies/uncertain.py"))


def choose(name, means, widths, seed):
    """The pair of a strategy for responses with two heads of these means and deviations."""
    responses = [
        {"components": {"low": mean - width, "high": mean + width}}
        for mean, width in zip(means, widths, strict=True)
    ]
    return MODULE[name](responses, seed, "low high")


@pytest.mark.parametrize("name", ["delta_ucb", "drts", "thompson"])
@given(
    scores=st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 3)), min_size=2, max_size=6),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_strategy_that_explores_takes_two_and_repeats_itself(name, scores, seed):
    means, widths = zip(*scores, strict=True)
    first, second = choose(name, means, widths, seed)
    assert first != second
    assert {first, second} <= set(range(len(means)))
    assert choose(name, means, widths, seed) == (first, second)


def test_without_uncertainty_extremes_or_the_best_two_are_compared():
    means, sure = [0.5, 2.0, -1.0, 1.5], [0.0] * 4
    assert choose("delta_ucb", means, sure, 3) == (1, 2)
    assert choose("drts", means, sure, 3) == (1, 2)
    assert choose("thompson", means, sure, 3) == (1, 3)
    assert choose("drts", [1.0, 1.0], [0.0, 0.0], 3) == (0, 1)


def test_delta_ucb_takes_the_largest_gap_that_may_be():
    # (m + w)_i − (m − w)_j: 1.2 + 0.9 of the first against 0.0 − 0.9 of the last.
    assert choose("delta_ucb", [1.2, 1.5, -0.1, 0.0], [0.9, 0.0, 0.0, 0.9], 0) == (0, 3)


@pytest.mark.parametrize(("name", "of"), [("drts", min), ("thompson", max)])
def test_draws_follow_the_scores_distributions(name, of):
    """Each response is the first as often as it is the best of normal draws, independently made."""
    means, widths = [0.0, 0.3, 0.1], [1.0, 0.1, 0.6]
    drawn = Counter(choose(name, means, widths, seed)[0] for seed in range(4000))
    random = np.random.default_rng(0)
    draws = random.normal(means, widths, (100_000, 3))
    shares = np.bincount(draws.argmax(axis=1), minlength=3) / len(draws)
    # Five standard errors of 4,000 draws.
    assert [drawn[place] / 4000 for place in range(3)] == pytest.approx(shares, abs=0.04)
    others = Counter(choose(name, means, widths, seed) for seed in range(4000))
    extreme = {min: draws.argmin(axis=1), max: draws.argmax(axis=1)}[of]
    against = np.bincount(extreme, minlength=3) / len(draws)
    given_first = against[[1, 2]] / against[[1, 2]].sum()
    total = others[0, 1] + others[0, 2]
    assert others[0, 1] / total == pytest.approx(given_first[0], abs=0.07)
