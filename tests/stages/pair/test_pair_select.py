from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.pair.select import STRATEGIES, UNCERTAIN

several_scores = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=9)
seeds = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize("name", STRATEGIES)
@given(scores=several_scores, seed=seeds)
def test_two_different_responses_the_better_one_chosen(name, scores, seed):
    chosen, rejected = STRATEGIES[name](scores, seed)
    assert chosen != rejected
    assert {chosen, rejected} <= set(range(len(scores)))
    assert scores[chosen] >= scores[rejected]
    assert STRATEGIES[name](scores, seed) == (chosen, rejected)


def test_hand_computed():
    scores = [0.5, 2.0, -1.0, 2.0]
    assert STRATEGIES["best_worst"](scores, 0) == (1, 2)
    assert STRATEGIES["first_two"](scores, 0) == (1, 0)
    assert [STRATEGIES["best_random"](scores, seed) for seed in range(3)] == [
        (1, 0),
        (1, 2),
        (1, 3),
    ]


def test_random_reaches_every_pair_alike():
    drawn = Counter(frozenset(STRATEGIES["random"]([0.0] * 4, seed)) for seed in range(12 * 50))
    assert len(drawn) == 6
    assert set(drawn.values()) == {100}


@pytest.mark.parametrize("name", STRATEGIES)
def test_at_a_tie_of_two_the_first_sample_stands_in_the_chosen_place(name):
    assert STRATEGIES[name]([1.0, 1.0], 12345) == (0, 1)


@pytest.mark.parametrize("name", UNCERTAIN)
@given(
    scores=st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 3)), min_size=2, max_size=6),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_strategy_that_explores_takes_two_and_repeats_itself(name, scores, seed):
    means, widths = zip(*scores, strict=True)
    first, second = UNCERTAIN[name](means, widths, seed)
    assert first != second
    assert {first, second} <= set(range(len(means)))
    assert UNCERTAIN[name](means, widths, seed) == (first, second)


def test_without_uncertainty_the_extremes_or_the_two_best_are_compared():
    means, sure = [0.5, 2.0, -1.0, 1.5], [0.0] * 4
    assert UNCERTAIN["delta_ucb"](means, sure, 3) == (1, 2)
    assert UNCERTAIN["drts"](means, sure, 3) == (1, 2)
    assert UNCERTAIN["thompson"](means, sure, 3) == (1, 3)
    assert UNCERTAIN["drts"]([1.0, 1.0], [0.0, 0.0], 3) == (0, 1)


def test_delta_ucb_takes_the_largest_gap_that_may_be():
    # (m + w)_i − (m − w)_j: 1.2 + 0.9 of the first against 0.0 − 0.9 of the last.
    assert UNCERTAIN["delta_ucb"]([1.2, 1.5, -0.1, 0.0], [0.9, 0.0, 0.0, 0.9], 0) == (0, 3)


@pytest.mark.parametrize(("name", "of"), [("drts", min), ("thompson", max)])
def test_draws_follow_the_scores_distributions(name, of):
    """Each response is the first as often as it is the best of normal draws, independently made."""
    means, widths = [0.0, 0.3, 0.1], [1.0, 0.1, 0.6]
    drawn = Counter(UNCERTAIN[name](means, widths, seed)[0] for seed in range(4000))
    random = np.random.default_rng(0)
    draws = random.normal(means, widths, (100_000, 3))
    shares = np.bincount(draws.argmax(axis=1), minlength=3) / len(draws)
    # Five standard errors of 4,000 draws.
    assert [drawn[place] / 4000 for place in range(3)] == pytest.approx(shares, abs=0.04)
    others = Counter(UNCERTAIN[name](means, widths, seed) for seed in range(4000))
    extreme = {min: draws.argmin(axis=1), max: draws.argmax(axis=1)}[of]
    against = np.bincount(extreme, minlength=3) / len(draws)
    given_first = against[[1, 2]] / against[[1, 2]].sum()
    total = others[0, 1] + others[0, 2]
    assert others[0, 1] / total == pytest.approx(given_first[0], abs=0.07)
