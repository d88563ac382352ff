import math

import pytest
from pydantic import ValidationError
from scipy import stats

from stages.promote.gate import decide
from stages.promote.params import PromoteParams
from stages.tables.wilson import wilson_interval

GOOD = {"win_rate": 0.6, "mean_reward": 1.5, "truncated_share": 0.1}


def wilson(wins, trials, confidence):
    """The bound as scipy has it."""
    test = stats.binomtest(wins, trials, alternative="greater")
    return pytest.approx(test.proportion_ci(confidence, method="wilson").low)


@pytest.mark.parametrize("confidence", [0.6, 0.9, 0.95, 0.999])
@pytest.mark.parametrize(("wins", "prompts"), [(0, 5), (3, 7), (60, 100), (256, 256)])
def test_the_lower_bound_is_scipy_s(wins, prompts, confidence):
    low, _ = wilson_interval(wins, prompts, 2 * confidence - 1)
    assert low == wilson(wins, prompts, confidence)


# The difference 0.2 has the standard error √(0.06² + 0.08²) = 0.1, so its lower bounds are
# 0.2 − 1.645 · 0.1 at 95 % and 0.2 − 2.326 · 0.1 at 99 %.
@pytest.mark.parametrize(
    ("confidence", "tolerance", "bound", "passes"),
    [(0.95, 0.0, 1.335515, True), (0.99, 0.0, 1.267365, False), (0.99, 0.04, 1.267365, True)],
)
def test_max_regression_wants_to_be_sure(confidence, tolerance, bound, passes):
    metrics = GOOD | {"mean_reward": 1.5, "mean_reward_se": 0.06, "win_rate": 1.0}
    held = {"m:1": GOOD | {"mean_reward": 1.3, "mean_reward_se": 0.08}}
    params = PromoteParams(better_than_base_confidence=confidence, max_regression=tolerance)
    metrics |= {"compared_prompts": 99, "tied_prompts": 0}
    gate = decide(params, metrics, held)[-1]
    assert (gate.gate, gate.passed) == ("max_regression", passes)
    assert gate.value == pytest.approx(bound, abs=1e-6)
    assert "m:1 has 1.3" in gate.reason


# As above: a difference of −0.02 with the standard error 0.1.
@pytest.mark.parametrize(
    ("confidence", "allowed", "error", "passes"),
    [
        (None, 0.02, 0.06, True),
        (None, 0.019, 0.06, False),
        (0.95, 0.15, 0.06, False),
        (0.95, 0.19, 0.06, True),
        # One prompt has no standard error.
        (None, 0.19, None, True),
        (0.95, 0.19, None, False),
    ],
)
def test_a_suite_may_fall_below_the_base_within_its_tolerance(confidence, allowed, error, passes):
    policy = {"mean_reward": 0.5, "mean_reward_se": error}
    policy |= {"base_mean_reward": 0.52, "base_mean_reward_se": 0.08}
    good = policy | {"mean_reward": 9.0, "mean_reward_se": 0.06}
    params = PromoteParams(
        better_than_base_confidence=confidence, suites_hold={"sums": allowed, "talk": 0.0}
    )
    metrics = GOOD | {"win_rate": 1.0, "compared_prompts": 99, "tied_prompts": 0}
    *_, sums, talk = decide(params, metrics, {}, {"talk": good, "sums": policy})
    assert (sums.gate, sums.passed) == ("suites_hold.sums", passes)
    assert talk.passed
    assert "the base has 0.52" in sums.reason


@pytest.mark.parametrize(
    "params", [{"aliases": ["latest"]}, {"aliases": ["../x"]}, {"model_name": "a/b"}]
)
def test_wrong_names_are_refused(params):
    with pytest.raises(ValidationError):
        PromoteParams.model_validate(params)


@pytest.mark.parametrize(
    ("wins", "ties", "compared", "passes"),
    [
        (40, 0, 64, True),
        (36, 0, 64, False),
        (20, 40, 64, True),
        (1, 63, 64, False),
        (0, 64, 64, False),
        (0, 63, 64, False),
        (5, 59, 64, True),
    ],
    ids=["clear", "may be luck", "clear among ties", "one win", "all tied", "one loss", "no loss"],
)
def test_the_default_gate_wants_better_than_base_with_confidence(wins, ties, compared, passes):
    metrics = {"win_rate": wins / compared, "tied_prompts": ties, "compared_prompts": compared}
    [gate] = decide(PromoteParams(), metrics, {})
    assert gate.passed is passes
    losses = compared - ties - wins
    assert f"{wins} prompts won, {losses} lost, {ties} tied" in gate.reason
    # The bound holds what it says: if the odds were even, this number of wins would be rare.
    chance = stats.binom.sf(wins - 1, wins + losses, 0.5)
    assert bool(chance < 0.05) is passes


COMPARED = {"win_rate": 0.625, "compared_prompts": 64, "tied_prompts": 4}


def test_a_gate_of_confidence_shows_the_bound_that_it_compared():
    better, plain = decide(PromoteParams(min_win_rate=0.55), COMPARED, {})
    assert (better.value, better.limit, better.passed) == (wilson(40, 60, 0.95), 0.5, True)
    assert "at least 0.561 of the decided prompts are won" in better.reason
    assert (plain.value, plain.limit, plain.passed) == (0.625, 0.55, True)


def test_a_bound_that_meets_one_half_is_not_enough_to_be_better():
    # At the least confidence that may be asked for, the bound is the share itself.
    even = COMPARED | {"win_rate": 0.5, "tied_prompts": 0}
    least = math.nextafter(0.5, 1.0)
    [gate] = decide(PromoteParams(better_than_base_confidence=least), even, {})
    assert (gate.value, gate.passed) == (0.5, False)
