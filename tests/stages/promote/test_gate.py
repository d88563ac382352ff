from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError
from scipy import stats

from stages.contract.errors import UserError
from stages.promote.gate import GateResult, decide, wilson_lower_bound
from stages.promote.params import PromoteParams


def alone(**limits: Any) -> PromoteParams:
    """The gates named, without the default one."""
    return PromoteParams(**({"better_than_base_confidence": None} | limits))


GOOD = {"win_rate": 0.6, "mean_reward": 1.5, "truncated_share": 0.1}


def test_without_gates_everything_passes():
    decision = decide(alone(), GOOD, {})
    assert decision.promoted
    assert decision.gates == ()


@pytest.mark.parametrize(
    ("limits", "passes"),
    [
        ({"min_win_rate": 0.6}, True),
        ({"min_win_rate": 0.61}, False),
        ({"min_mean_reward": 1.5}, True),
        ({"min_mean_reward": 1.6}, False),
        ({"max_truncated_share": 0.1}, True),
        ({"max_truncated_share": 0.05}, False),
        ({"min_win_rate": 0.5, "max_truncated_share": 0.05}, False),
    ],
)
def test_limits_are_inclusive_and_all_must_hold(limits, passes):
    decision = decide(alone(**limits), GOOD, {})
    assert decision.promoted is passes
    assert len(decision.gates) == len(limits)
    assert bool(decision.reasons) is not passes


def test_a_failed_gate_says_why():
    decision = decide(alone(min_win_rate=0.75), GOOD, {})
    assert decision.reasons == ["min_win_rate: win_rate is 0.6; the gate wants at least 0.75"]


@pytest.mark.parametrize(
    ("rate", "prompts", "confidence", "limit", "passes"),
    [
        (0.6, 100, None, 0.55, True),
        # 60 wins of 100: the one-sided 95 % bound is 0.517, of 600 of 1000 it is 0.574.
        (0.6, 100, 0.95, 0.55, False),
        (0.6, 1000, 0.95, 0.55, True),
        (0.6, 100, 0.95, 0.51, True),
        # However good the rate: of three prompts nobody can be sure.
        (1.0, 3, 0.95, 0.55, False),
    ],
)
def test_a_win_rate_may_have_to_be_sure(rate, prompts, confidence, limit, passes):
    params = alone(min_win_rate=limit, min_win_rate_confidence=confidence)
    metrics = GOOD | {"win_rate": rate, "compared_prompts": prompts}
    decision = decide(params, metrics, {})
    assert decision.promoted is passes, decision.reasons
    assert passes or f"of {prompts} prompts" in decision.reasons[0]


@pytest.mark.parametrize("confidence", [0.6, 0.9, 0.95, 0.999])
@pytest.mark.parametrize(("wins", "prompts"), [(0, 5), (3, 7), (60, 100), (256, 256)])
def test_the_lower_bound_is_scipy_s(wins, prompts, confidence):
    test = stats.binomtest(wins, prompts, alternative="greater")
    expected = test.proportion_ci(confidence, method="wilson").low
    assert wilson_lower_bound(wins / prompts, prompts, confidence) == pytest.approx(expected)


def test_a_confidence_needs_a_win_rate_to_be_sure_of():
    with pytest.raises(ValidationError, match="min_win_rate is not"):
        alone(min_win_rate_confidence=0.95)


@pytest.mark.parametrize(
    ("before", "tolerance", "passes"),
    [(1.5, 0.0, True), (1.6, 0.0, False), (1.6, 0.2, True), (None, 0.0, True)],
)
def test_no_regression_compares_with_the_version_that_the_alias_holds(before, tolerance, passes):
    params = alone(regression_tolerance=tolerance)
    assert decide(params, GOOD, {"m:1": GOOD | {"mean_reward": before}}).promoted is passes


# The difference 0.2 has the standard error √(0.06² + 0.08²) = 0.1, so its lower bounds are
# 0.2 − 1.645 · 0.1 at 95 % and 0.2 − 2.326 · 0.1 at 99 %.
@pytest.mark.parametrize(
    ("confidence", "tolerance", "bound", "passes"),
    [(0.95, 0.0, 1.335515, True), (0.99, 0.0, 1.267365, False), (0.99, 0.04, 1.267365, True)],
)
def test_no_regression_wants_to_be_sure(confidence, tolerance, bound, passes):
    metrics = GOOD | {"mean_reward": 1.5, "mean_reward_se": 0.06, "win_rate": 1.0}
    held = {"m:1": GOOD | {"mean_reward": 1.3, "mean_reward_se": 0.08}}
    params = PromoteParams(better_than_base_confidence=confidence, regression_tolerance=tolerance)
    metrics |= {"compared_prompts": 99, "tied_prompts": 0}
    gate = decide(params, metrics, held).gates[-1]
    assert (gate.gate, gate.passed) == ("no_regression", passes)
    assert gate.value == pytest.approx(bound, abs=1e-6)
    assert "m:1 has 1.3" in gate.reason


def test_no_regression_looks_at_every_alias():
    held = {"m:1": GOOD | {"mean_reward": 1.0}, "m:2": GOOD | {"mean_reward": 2.0}}
    assert [each.passed for each in decide(alone(), GOOD, held).gates] == [True, False]


def test_regression_may_be_allowed():
    assert decide(alone(no_regression=False), GOOD, {"m:1": {"mean_reward": 9.0}}).promoted


def test_a_metric_without_a_value_does_not_pass():
    decision = decide(alone(min_mean_reward=-1.0), GOOD | {"mean_reward": None}, {})
    assert decision.reasons == [
        "min_mean_reward: mean_reward has no value; the gate wants at least -1"
    ]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"loss": 1.0, "accuracy": 0.5},
            "the gate min_win_rate looks at 'win_rate', which the metrics lack "
            r"\(they have: accuracy, loss\)",
        ),
        ({}, "they have: nothing"),
        ({"win_rate": "0.6"}, "the metric 'win_rate' is '0.6', not a number"),
    ],
)
def test_what_is_no_evaluation_is_refused(metrics, message):
    with pytest.raises(UserError, match=message) as caught:
        decide(alone(min_win_rate=0.5), metrics, {})
    assert caught.value.remedy == "pass metrics.json of the evaluate stage"


def test_a_previous_evaluation_is_held_to_the_same():
    with pytest.raises(UserError, match="the gate no_regression looks at 'mean_reward'"):
        decide(alone(no_regression=True), GOOD, {"m:1": {"loss": 1.0}})


@pytest.mark.parametrize(
    "params",
    [
        {"aliases": ["latest"]},
        {"aliases": ["../x"]},
        {"model_name": "a/b"},
        {"min_win_rate": 1.5},
        {"max_truncated_share": -0.1},
        {"regression_tolerance": -1},
        {"min_winrate": 0.5},
    ],
)
def test_wrong_parameters_are_refused(params):
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
def test_by_default_a_model_must_be_better_than_the_base_with_confidence(
    wins: int, ties: int, compared: int, passes: bool
) -> None:
    metrics = {
        "win_rate": wins / compared,
        "tied_prompts": ties,
        "compared_prompts": compared,
    }
    decision = decide(PromoteParams(), metrics, {})
    assert decision.promoted is passes
    [gate] = decision.gates
    losses = compared - ties - wins
    assert f"{wins} prompts won, {losses} lost, {ties} tied" in gate.reason
    # The bound holds what it says: were the odds even, so many wins would be rare.
    chance = stats.binom.sf(wins - 1, wins + losses, 0.5)
    assert bool(chance < 0.05) is passes


def wilson(wins: int, trials: int, confidence: float) -> Any:
    """The bound as scipy has it."""
    test = stats.binomtest(wins, trials, alternative="greater")
    return pytest.approx(test.proportion_ci(confidence, method="wilson").low)


COMPARED = {"win_rate": 0.625, "compared_prompts": 64, "tied_prompts": 4}


def test_a_gate_of_confidence_shows_the_bound_that_it_compared() -> None:
    params = PromoteParams(
        better_than_base_confidence=0.95, min_win_rate=0.55, min_win_rate_confidence=0.9
    )
    better, plain, sure = decide(params, COMPARED, {}).gates
    assert better == GateResult(
        "better_than_base_confidence",
        "win_rate",
        wilson(40, 60, 0.95),
        0.5,
        True,
        "better_than_base_confidence: 40 prompts won, 20 lost, 4 tied; with confidence 0.95 at "
        "least 0.561 of those that do not tie are won, and the gate wants more than 0.5",
    )
    assert plain == GateResult(
        "min_win_rate",
        "win_rate",
        0.625,
        0.55,
        True,
        "min_win_rate: win_rate is 0.625; the gate wants at least 0.55",
    )
    assert sure == GateResult(
        "min_win_rate_confidence",
        "win_rate",
        wilson(40, 64, 0.9),
        0.55,
        False,
        "min_win_rate_confidence: win_rate is at least 0.545231 with confidence 0.9 (0.625 of 64 "
        "prompts); the gate wants at least 0.55",
    )


@pytest.mark.parametrize(
    "lacking",
    [
        {"win_rate": None},
        {"compared_prompts": 0},
        {"compared_prompts": None},
        {"compared_prompts": None, "win_rate": None},
    ],
    ids=str,
)
def test_a_gate_of_confidence_fails_where_nothing_is_compared(lacking: dict[str, Any]) -> None:
    params = PromoteParams(min_win_rate=0.55, min_win_rate_confidence=0.9)
    decision = decide(params, COMPARED | lacking, {})
    better, _, sure = decision.gates
    assert better == GateResult(
        "better_than_base_confidence",
        "win_rate",
        None,
        0.5,
        False,
        "better_than_base_confidence: no prompt is compared; the gate wants more wins than losses",
    )
    assert sure == GateResult(
        "min_win_rate_confidence",
        "win_rate",
        None,
        0.55,
        False,
        "min_win_rate_confidence: win_rate has no value; the gate wants a lower bound of 0.55",
    )
    assert not decision.promoted


def test_without_a_count_of_ties_nobody_knows_which_model_is_better() -> None:
    [gate] = decide(PromoteParams(), COMPARED | {"tied_prompts": None}, {}).gates
    assert (gate.value, gate.passed) == (None, False)
    assert "no prompt is compared" in gate.reason


def test_a_bound_that_meets_a_limit_is_enough_for_a_win_rate_and_not_to_be_better() -> None:
    bound = wilson_lower_bound(0.625, 64, 0.9)
    params = alone(min_win_rate=bound, min_win_rate_confidence=0.9)
    assert decide(params, COMPARED, {}).promoted
    # With the least confidence that may be asked for, the bound is the share itself.
    even = COMPARED | {"win_rate": 0.5, "tied_prompts": 0}
    least = math.nextafter(0.5, 1.0)
    [gate] = decide(PromoteParams(better_than_base_confidence=least), even, {}).gates
    assert (gate.value, gate.passed) == (0.5, False)


@pytest.mark.parametrize(
    ("limits", "gate", "metrics"),
    [
        ({"better_than_base_confidence": 0.95}, "better_than_base_confidence", tuple(COMPARED)),
        (
            {"min_win_rate": 0.5, "min_win_rate_confidence": 0.9},
            "min_win_rate_confidence",
            ("compared_prompts",),
        ),
    ],
)
def test_a_gate_names_the_metric_that_it_misses(limits, gate, metrics) -> None:
    for metric in metrics:
        found = {name: value for name, value in COMPARED.items() if name != metric}
        with pytest.raises(UserError, match=f"the gate {gate} looks at '{metric}'"):
            decide(alone(**limits), found, {})
