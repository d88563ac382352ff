"""Gates of a promotion: verdicts with their reasons. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from stages.promote.params import PromoteParams
from stages.tables.wilson import wilson_interval


@dataclass(frozen=True)
class GateResult:
    """Verdict of one gate: the value that it compared with its limit, and why in words."""

    gate: str
    value: float
    limit: float
    passed: bool
    reason: str


# Share of wins of a model that is neither better nor worse.
_EVEN = 0.5


def decide(
    params: PromoteParams,
    metrics: Mapping[str, Any],
    held: Mapping[str, Mapping[str, Any]],
    suites: Mapping[str, Mapping[str, Any]] = {},
    candidate: str = "MODEL",
) -> list[GateResult]:
    """Applies the gates that ``params`` set; a checkpoint is promoted if all of them pass.

    It must not fall behind the evaluations ``held``, by the name of the version that an alias
    holds. One without figures cannot be compared, and fails its gate; the reason says how to
    compare it with the ``candidate``, by its name.
    """
    gates = []
    if params.better_than_base_confidence is not None:
        gates.append(_better_than_base(params.better_than_base_confidence, metrics))
    if params.min_win_rate is not None:
        gates.append(_win_rate(params.min_win_rate, metrics))
    if params.max_regression is not None:
        for version, before in held.items():
            fall = params.max_regression
            gates.append(
                _holds("max_regression", params, metrics, before, version, fall, candidate)
            )
    for suite, allowed in params.suites_hold.items():
        policy = suites[suite]
        # `evaluate` ends well only if both models have a score.
        base = {name: policy[f"base_{name}"] for name in ("mean_reward", "mean_reward_se")}
        gate = f"suites_hold.{suite}"
        gates.append(_holds(gate, params, policy, base, "the base", allowed, candidate))
    return gates


def _win_rate(limit: float, metrics: Mapping[str, Any]) -> GateResult:
    gate = "min_win_rate"
    value = metrics["win_rate"]
    reason = f"{gate}: win_rate is {value:.6g}; the gate wants at least {limit:.6g}"
    return GateResult(gate, value, limit, value >= limit, reason)


def _better_than_base(confidence: float, metrics: Mapping[str, Any]) -> GateResult:
    """Wins against losses; ties say nothing of which model is better."""
    gate = "better_than_base_confidence"
    prompts = metrics["compared_prompts"]
    ties = metrics["tied_prompts"]
    wins = round(metrics["win_rate"] * prompts)
    decided = prompts - ties
    # The lower end of the two-sided interval that leaves out as much above its upper end.
    bound = wilson_interval(wins, decided, 2 * confidence - 1)[0] if decided else 0.0
    reason = (
        f"{gate}: {wins:g} prompts won, {decided - wins:g} lost, {ties:g} tied; with confidence "
        f"{confidence:g} at least {bound:.3f} of the decided prompts are won, and the gate wants "
        f"more than {_EVEN:g}"
    )
    return GateResult(gate, bound, _EVEN, bound > _EVEN, reason)


def _holds(
    gate: str,
    params: PromoteParams,
    metrics: Mapping[str, Any],
    other: Mapping[str, Any],
    holder: str,
    tolerance: float,
    candidate: str,
) -> GateResult:
    """Compares mean rewards as separate samples, although they may share prompts."""
    confidence = params.better_than_base_confidence
    value = metrics["mean_reward"]
    held = other.get("mean_reward")
    if held is None:
        reason = (
            f"{gate}: {holder} has no mean_reward by this oracle, sampling and prompts; "
            f"`geb evaluate CONFIG {candidate} --base {holder}` compares the two, and "
            f"`geb promote {candidate}` moves an alias by hand"
        )
        return GateResult(gate, value, tolerance, False, reason)
    limit = held - tolerance
    errors: list[Any] = [rewards.get("mean_reward_se") for rewards in (metrics, other)]
    bound = value
    shown = f"is {value:.6g}"
    if confidence is not None and None in errors:
        reason = (
            f"{gate}: mean_reward {shown}; {holder} has {held:.6g}, and a single prompt says "
            "nothing of its error"
        )
        return GateResult(gate, value, limit, False, reason)
    if confidence is not None:
        bound = value - NormalDist().inv_cdf(confidence) * math.hypot(*errors)
        shown += f", with confidence {confidence:g} of the difference at least {bound:.6g}"
    reason = (
        f"{gate}: mean_reward {shown}; {holder} has {held:.6g}, and the gate wants at least "
        f"{limit:.6g}"
    )
    return GateResult(gate, bound, limit, bound >= limit, reason)
