"""Gates of a promotion: verdicts with their reasons. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from stages.contract.errors import UserError
from stages.promote.params import PromoteParams


@dataclass(frozen=True)
class GateResult:
    """Verdict of one gate.

    Attributes:
        gate: Its name, as in the parameters.
        metric: The metric that it looks at.
        value: That metric's value; None where the evaluation has none.
        limit: What it was compared with.
        passed: Whether the checkpoint passes.
        reason: The comparison in words.
    """

    gate: str
    metric: str
    value: float | None
    limit: float
    passed: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """All gates together.

    Attributes:
        promoted: Whether every gate passed.
        gates: Each gate that was set.
    """

    promoted: bool
    gates: tuple[GateResult, ...]

    @property
    def reasons(self) -> list[str]:
        """Reasons why the checkpoint is not promoted; empty when it is."""
        return [gate.reason for gate in self.gates if not gate.passed]

    def as_json(self) -> dict[str, Any]:
        """The decision for ``decision.json``."""
        return {"promoted": self.promoted, "gates": [asdict(gate) for gate in self.gates]}


# Share of wins of a model that is neither better nor worse.
_EVEN = 0.5
_AT_LEAST = (operator.ge, "at least")
_AT_MOST = (operator.le, "at most")

# Parameter that holds the limit -> metric, comparison. A new gate is a row here and that parameter.
_GATES: Mapping[str, tuple[str, tuple[Callable[[float, float], bool], str]]] = {
    "min_win_rate": ("win_rate", _AT_LEAST),
    "min_mean_reward": ("mean_reward", _AT_LEAST),
    "max_truncated_share": ("truncated_share", _AT_MOST),
}


def decide(
    params: PromoteParams, metrics: Mapping[str, Any], held: Mapping[str, Mapping[str, Any]]
) -> Decision:
    """Applies the gates that ``params`` set.

    Args:
        params: Limits.
        metrics: The checkpoint's evaluation.
        held: Evaluations that it must not fall behind, by the name of the version that an alias
            holds.

    Raises:
        UserError: An evaluation lacks a metric that a gate looks at.
    """
    gates = []
    if params.better_than_base_confidence is not None:
        gates.append(_better_than_base(params.better_than_base_confidence, metrics))
    gates += [
        _apply(name, metric, metrics, limit, comparison)
        for name, (metric, comparison) in _GATES.items()
        if (limit := getattr(params, name)) is not None
    ]
    if params.min_win_rate is not None and params.min_win_rate_confidence is not None:
        gates.append(_sure_win_rate(params.min_win_rate, params.min_win_rate_confidence, metrics))
    if params.no_regression:
        for version, before in held.items():
            # A version without a reward leaves nothing to fall behind.
            if _metric(before, "mean_reward", "no_regression") is not None:
                gates.append(_no_regression(params, metrics, version, before))
    return Decision(promoted=all(gate.passed for gate in gates), gates=tuple(gates))


def _apply(
    gate: str,
    metric: str,
    metrics: Mapping[str, Any],
    limit: float,
    comparison: tuple[Callable[[float, float], bool], str],
) -> GateResult:
    value = _metric(metrics, metric, gate)
    holds, words = comparison
    passed = value is not None and holds(value, limit)
    shown = "has no value" if value is None else f"is {value:.6g}"
    reason = f"{gate}: {metric} {shown}; the gate wants {words} {limit:.6g}"
    return GateResult(gate, metric, value, limit, passed, reason)


def _better_than_base(confidence: float, metrics: Mapping[str, Any]) -> GateResult:
    """Wins against losses; ties say nothing of which model is better."""
    gate = "better_than_base_confidence"
    rate = _metric(metrics, "win_rate", gate)
    prompts, ties = (_metric(metrics, each, gate) for each in ("compared_prompts", "tied_prompts"))
    if rate is None or not prompts or ties is None:
        reason = f"{gate}: no prompt is compared; the gate wants more wins than losses"
        return GateResult(gate, "win_rate", None, _EVEN, False, reason)
    wins, decided = round(rate * prompts), prompts - ties
    bound = wilson_lower_bound(wins / decided, decided, confidence) if decided else 0.0
    reason = (
        f"{gate}: {wins:g} prompts won, {decided - wins:g} lost, {ties:g} tied; with confidence "
        f"{confidence:g} at least {bound:.3f} of those that do not tie are won, and the gate wants "
        f"more than {_EVEN:g}"
    )
    return GateResult(gate, "win_rate", bound, _EVEN, bound > _EVEN, reason)


def _no_regression(
    params: PromoteParams, metrics: Mapping[str, Any], version: str, before: Mapping[str, Any]
) -> GateResult:
    """Compares mean rewards; as samples of their own, although they may share prompts."""
    gate, confidence = "no_regression", params.better_than_base_confidence
    value, held = (_metric(each, "mean_reward", gate) for each in (metrics, before))
    assert held is not None
    limit = held - params.regression_tolerance
    wants = f"{version} has {held:.6g}, and the gate wants at least {limit:.6g}"
    if value is None:
        reason = f"{gate}: mean_reward has no value; {wants}"
        return GateResult(gate, "mean_reward", None, limit, False, reason)
    error, held_error = (each.get("mean_reward_se") for each in (metrics, before))
    if confidence is None or error is None or held_error is None:
        reason = f"{gate}: mean_reward is {value:.6g}; {wants}"
        return GateResult(gate, "mean_reward", value, limit, value >= limit, reason)
    bound = value - NormalDist().inv_cdf(confidence) * math.hypot(error, held_error)
    reason = (
        f"{gate}: mean_reward is {value:.6g}, with confidence {confidence:g} of the difference at "
        f"least {bound:.6g}; {wants}"
    )
    return GateResult(gate, "mean_reward", bound, limit, bound >= limit, reason)


def _sure_win_rate(limit: float, confidence: float, metrics: Mapping[str, Any]) -> GateResult:
    gate = "min_win_rate_confidence"
    rate = _metric(metrics, "win_rate", gate)
    prompts = _metric(metrics, "compared_prompts", gate)
    if rate is None or not prompts:
        reason = f"{gate}: win_rate has no value; the gate wants a lower bound of {limit:.6g}"
        return GateResult(gate, "win_rate", None, limit, False, reason)
    bound = wilson_lower_bound(rate, prompts, confidence)
    reason = (
        f"{gate}: win_rate is at least {bound:.6g} with confidence {confidence:g} ({rate:.6g} of "
        f"{prompts:g} prompts); the gate wants at least {limit:.6g}"
    )
    return GateResult(gate, "win_rate", bound, limit, bound >= limit, reason)


def wilson_lower_bound(rate: float, trials: float, confidence: float) -> float:
    """One-sided lower bound of a proportion (Wilson 1927).

    Args:
        rate: Share of successes.
        trials: Number of independent trials.
        confidence: Chance that the bound is below the true proportion.
    """
    z = NormalDist().inv_cdf(confidence)
    middle = rate + z * z / (2 * trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    return max(0.0, (middle - half) / (1 + z * z / trials))


def _metric(metrics: Mapping[str, Any], name: str, gate: str) -> float | None:
    if name not in metrics:
        raise UserError(
            f"the gate {gate} looks at {name!r}, which the metrics lack "
            f"(they have: {', '.join(sorted(metrics)) or 'nothing'})",
            "pass metrics.json of the evaluate stage",
        )
    value = metrics[name]
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise UserError(
            f"the metric {name!r} is {value!r}, not a number",
            "pass metrics.json of the evaluate stage",
        )
    return value
