from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.pair.select import STRATEGIES

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
