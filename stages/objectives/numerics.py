"""Scalar functions that stay accurate, with their gradients, for all log-probabilities.

Automatic differentiation of the textbook forms fails in two ways that matter here. `exp` underflows
before a `log` can undo it, and `torch.expm1` differentiates itself as `result + 1`, which rounds to
zero for arguments below -17 in float32. Each function below picks, per element, the form that is
accurate there; the argument of the form not chosen is replaced first, because `torch.where` would
otherwise turn its infinite gradient into NaN.

Every function is elementwise, keeps the shape of its argument, and can be differentiated twice.
"""

import math

import torch
from torch import Tensor

LOG_2 = math.log(2.0)

BOX_COX_SERIES_BELOW = 1e-8
"""|λ| under which Box–Cox is summed as a series: float32 would round λ·x to nothing first."""

EXPONENT_MARGIN = 1e-4
"""Nats kept from the largest exponent: `exp` of a rounded argument must not overflow."""


def working_precision(values: Tensor) -> Tensor:
    """Return `values` in float32 or float64; bfloat16 and float16 are upcast to float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def expm1(x: Tensor) -> Tensor:
    """e^x − 1, accurate near zero, with the gradient e^x accurate for every x."""
    near = x > -1.0
    return torch.where(
        near,
        torch.expm1(torch.where(near, x, 0.0)),
        torch.exp(torch.where(near, -1.0, x)) - 1.0,
    )


def one_minus_exp(logp: Tensor) -> Tensor:
    """1 − e^logp for logp ≤ 0, without cancellation as the probability nears one."""
    return -expm1(logp)


def log_mean_exp_with_one(x: Tensor) -> Tensor:
    """log((1 + e^x)/2), the log of the mean of one and e^x, accurate near zero and at both ends."""
    near = x.abs() < 1.0
    return torch.where(
        near,
        torch.log1p(torch.expm1(torch.where(near, x, 0.0)) / 2.0),
        -torch.nn.functional.logsigmoid(-torch.where(near, 1.0, x)) - LOG_2,
    )


def centered_sigmoid(x: Tensor) -> Tensor:
    """σ(x) − ½, accurate near zero, with a gradient σ(x)σ(−x) that is accurate in both tails."""
    near = x.abs() < 1.0
    left = torch.where(x <= -1.0, x, -1.0)
    right = torch.where(x >= 1.0, x, 1.0)
    tails = torch.where(x < 0.0, torch.sigmoid(left) - 0.5, 0.5 - torch.sigmoid(-right))
    return torch.where(near, torch.tanh(torch.where(near, x, 0.0) / 2.0) / 2.0, tails)


def box_cox(log_u: Tensor, lam: float, *, max_exponent: float | None = None) -> Tensor:
    """Box–Cox transform (u^λ − 1)/λ of u = e^log_u, which is log u at λ = 0.

    The exponent λ·log u is held at `max_exponent`, past which the value has no float; there the
    result is constant and its gradient zero. A linear continuation would keep a gradient, but one
    near the largest float, whose square overflows any gradient norm. By default the largest
    exponent is the largest representable one.
    """
    if lam == 0.0:
        return log_u
    if abs(lam) < BOX_COX_SERIES_BELOW:
        return log_u * (1.0 + lam * log_u / 2.0)
    return expm1((lam * log_u).clamp(max=_exponent_limit(log_u, lam, max_exponent))) / lam


def box_cox_saturates(log_u: Tensor, lam: float, *, max_exponent: float | None = None) -> Tensor:
    """Mask of the places where `box_cox` holds its exponent: booleans of the shape of `log_u`."""
    if abs(lam) < BOX_COX_SERIES_BELOW:
        return torch.zeros_like(log_u, dtype=torch.bool)
    return lam * log_u > _exponent_limit(log_u, lam, max_exponent)


def _exponent_limit(log_u: Tensor, lam: float, max_exponent: float | None) -> float:
    largest = math.log(torch.finfo(log_u.dtype).max)
    representable = largest - math.log(1.0 / abs(lam)) - EXPONENT_MARGIN
    return representable if max_exponent is None else min(max_exponent, representable)
