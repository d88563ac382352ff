"""f-divergences between policy and reference, and the implicit reward each induces.

Shapes: `B` responses. ℓ = log π(y|x) − log π_ref(y|x) is the logratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.objectives.numerics import (
    box_cox,
    box_cox_saturates,
    log_mean_exp_with_one,
    working_precision,
)

REWARD_EXPONENT_HEADROOM = math.log(6000.0)
"""Nats between the largest exponent of an implicit reward and overflow (80.0 remain in float32, the
value TRL clamps to): the margin of two rewards times β must be finite as well."""


def _nowhere(log_u: Tensor) -> Tensor:
    return torch.zeros_like(log_u, dtype=torch.bool)


@dataclass(frozen=True)
class Divergence:
    """One f-divergence D_f = E_{π_ref} f(π/π_ref), by functions of log u, elementwise."""

    name: str
    """The name under which it is configured."""
    derivative: Callable[[Tensor], Tensor]
    """f′(u), the implicit reward of u = π/π_ref."""
    conjugate_gain: Callable[[Tensor], Tensor]
    """U f′(u) − f(u), the bonus of u (Eq. 11)."""
    derivative_saturates: Callable[[Tensor], Tensor] = _nowhere
    """Mask of the places at which `derivative` is held constant."""
    gain_saturates: Callable[[Tensor], Tensor] = _nowhere
    """Mask of the places at which `conjugate_gain` is."""
    alpha: float | None = None
    """α of an α-divergence, which GEB's 1 + α − π and arctanh(1−π) + α contain; None outside that
    family."""


def alpha_divergence(name: str, alpha: float) -> Divergence:
    """The α-divergence f(u) = (u^α − αu − (1−α)) / (α(α−1)).

    Definition 3.2 with the sign that its tables follow: f′(u) = (u^{α−1} − 1)/(α−1), log u at
    α = 1; the bonus is (u^α − 1)/α, log u at α = 0.
    """

    def derivative(log_u: Tensor) -> Tensor:
        return box_cox(log_u, alpha - 1.0, max_exponent=_reward_exponent(log_u))

    def derivative_saturates(log_u: Tensor) -> Tensor:
        return box_cox_saturates(log_u, alpha - 1.0, max_exponent=_reward_exponent(log_u))

    return Divergence(
        name,
        derivative,
        lambda log_u: box_cox(log_u, alpha),
        derivative_saturates,
        lambda log_u: box_cox_saturates(log_u, alpha),
        alpha,
    )


def _js_derivative(log_u: Tensor) -> Tensor:
    """log(2u/(1+u))."""
    return -log_mean_exp_with_one(-log_u)


def _reward_exponent(log_u: Tensor) -> float:
    return math.log(torch.finfo(log_u.dtype).max) - REWARD_EXPONENT_HEADROOM


DIVERGENCES: dict[str, Divergence] = {
    row.name: row
    for row in (
        alpha_divergence("reverse_kl", 1.0),
        alpha_divergence("hellinger", 0.5),
        alpha_divergence("forward_kl", 0.0),
        # Its bonus is log((1+u)/2).
        Divergence("js", _js_derivative, log_mean_exp_with_one),
    )
}
"""The divergences that have a name. Any other α in [0, 1] is given as a number."""


def resolve_divergence(divergence: str | float) -> Divergence:
    """Return the divergence called `divergence`, or the α-divergence of that α in [0, 1]."""
    if isinstance(divergence, str):
        return DIVERGENCES[divergence]
    for row in DIVERGENCES.values():
        if row.alpha == divergence:
            return row
    return alpha_divergence(f"alpha={divergence:g}", divergence)


def implicit_reward(logratio: Tensor, *, divergence: str | float) -> Tensor:
    """Reward f′(π/π_ref) that the policy implies, up to β and a term of the prompt (Eq. 6).

    (e^{(α−1)ℓ} − 1)/(α−1) for an α-divergence, ℓ itself under reverse KL, log 2 + log σ(ℓ) under
    Jensen–Shannon. For α < 1 the exponential overflows at very negative ℓ: its exponent is held at
    80 in float32 (701 in float64), where the reward is constant (`reward_saturation`).
    From ℓ [B] to rewards [B], in float32 or float64.
    """
    return resolve_divergence(divergence).derivative(working_precision(logratio))


def reward_saturation(logratio: Tensor, *, divergence: str | float) -> Tensor:
    """Mask of the responses whose implicit reward is clamped, hence constant: booleans [B]."""
    return resolve_divergence(divergence).derivative_saturates(working_precision(logratio).detach())
