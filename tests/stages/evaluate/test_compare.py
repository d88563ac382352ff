from __future__ import annotations

import math

import pytest

from stages.contract.errors import UserError
from stages.evaluate.summary import PromptRewards, clustered_standard_error, win_rate


def rewards(**sums: float | None) -> dict[str, PromptRewards | None]:
    return {name: None if each is None else PromptRewards(each, 2) for name, each in sums.items()}


def test_ties_lose_and_count_half_in_the_split_rate():
    found = win_rate(rewards(a=1.0, b=0.5, c=0.0, d=2.0), rewards(a=0.5, b=0.5, c=1.0, d=1.0))
    assert found == {
        "win_rate": 0.5,
        "win_rate_se": pytest.approx(math.sqrt(0.25 / 4)),
        "win_rate_ties_split": 0.625,
        "compared_prompts": 4,
        "tied_prompts": 1,
        "uncompared_prompts": 0,
    }


def test_prompts_of_one_model_or_without_a_score_are_left_out_and_counted():
    found = win_rate(rewards(a=1.0, b=None, c=1.0, d=1.0), rewards(a=0.0, b=0.0, c=None, e=0.0))
    assert (found["win_rate"], found["compared_prompts"]) == (1.0, 1)
    assert found["uncompared_prompts"] == 4


def test_nothing_to_compare_is_refused():
    with pytest.raises(UserError, match="no scored prompt in common"):
        win_rate(rewards(a=1.0), rewards(b=1.0))


def test_different_numbers_of_samples_are_refused():
    with pytest.raises(UserError, match="prompt a has 2 samples of the policy and 3 of the base"):
        win_rate(rewards(a=1.0), {"a": PromptRewards(1.0, 3)})


def test_the_standard_error_is_that_of_the_prompts_means():
    assert clustered_standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert clustered_standard_error([1.0]) is None
