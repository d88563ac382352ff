"""The exploratory bonus of a batch of responses.

Shapes: `B` responses, `T` tokens. π of a response is, by `probability`,

    sequence    e^{Σ log p}, as the paper writes it                  log-probs [B]
    token_mean  e^{mean log p}, the geometric mean per token         log-probs [B], num_tokens [B]
    token       each token's own, the bonus averaged over tokens     log-probs [B, T], mask [B, T]

Whatever the choice, it applies alike to log π and to log π_ref, in every design.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.objectives.designs import DESIGNS, PUBLISHED_BONUSES, Terms
from stages.objectives.divergences import resolve_divergence
from stages.objectives.numerics import working_precision
from stages.objectives.params import ObjectiveParams


@dataclass(frozen=True)
class Bonus:
    """An exploratory bonus evaluated on a batch of responses."""

    value: Tensor
    """L_bonus of each response, [B], attached to log π."""
    saturation: Callable[[], tuple[Tensor, Tensor]]
    """Finds the responses whose bonus saturates; log π must be differentiable.

    It returns two masks [B]: of bonuses whose true value has no float (for probability="token": at
    some token); and of those not clamped, whose gradient is exactly zero all the same."""


def without_saturation(value: Tensor) -> Bonus:
    """A bonus of which no response saturates, [B]."""
    idle = torch.zeros_like(value, dtype=torch.bool)
    return Bonus(value, lambda: (idle, idle))


def exploratory_bonus(
    logp: Tensor,
    ref_logp: Tensor,
    params: ObjectiveParams,
    *,
    num_tokens: Tensor | None = None,
    mask: Tensor | None = None,
) -> Bonus:
    """L_bonus of each response, which the loss *subtracts*: L − κ · L_bonus (Eq. 3, Eq. 11).

    For GEB's designs of u it is u f′(u) − f(u) = (u^α − 1)/α, log u at α = 0; `inverse_pi` under
    forward KL is −log π. The baselines are as in their authors' code, negated if that adds them.

    Exact numerics give a finite bonus and gradient for log π in [−5000, 0]. Where the true bonus
    has no float (1/π under reverse KL below −88 in float32; log(1−π) at π = 1) it is held at the
    last value that has one, and its gradient is zero; `Bonus.saturation` marks these responses.

    Args:
        logp: log π, summed over the response [B]; for probability="token" per token [B, T].
        ref_logp: log π_ref in the shape of `logp`, for feb, selm, vpo and se_popo.
        params: the design, its divergence, β, its probability and its numerics.
        num_tokens: response lengths [B], for probability="token_mean".
        mask: booleans [B, T], true on response tokens, for probability="token". A response without
            tokens has bonus zero.

    Returns:
        Bonuses [B], in float64 for float64 input and float32 otherwise.
    """
    design = DESIGNS[params.design]
    divergence = resolve_divergence(params.divergence)

    def per_unit(values: Tensor) -> Tensor:
        """The log π that `probability` means: [B], or [B, T] made harmless off the mask."""
        if params.probability == "token":
            assert mask is not None, "one bonus for each token of a mask"
            return torch.where(mask, working_precision(values), -1.0)
        if params.probability == "token_mean":
            assert num_tokens is not None, "a mean is over tokens"
            return working_precision(values) / num_tokens
        return working_precision(values)

    terms = Terms(per_unit(logp), divergence, per_unit(ref_logp), params.beta)
    is_exact = params.numerics == "exact"
    published = None if is_exact else PUBLISHED_BONUSES.get((design.name, divergence.name))
    value = published(terms.logp) if published else design.bonus(terms)
    tokens = mask if params.probability == "token" else None
    if tokens is not None:
        num_tokens = tokens.sum(dim=1).clamp(min=1)
        value = torch.where(tokens, value, 0.0).sum(dim=1) / num_tokens
    if design.name == "none":
        return without_saturation(value)

    def saturation() -> tuple[Tensor, Tensor]:
        (gradient,) = torch.autograd.grad(value.sum(), logp, retain_graph=True)
        without_gradient = gradient == 0.0
        clamped = design.clamped(terms)
        if tokens is not None:
            without_gradient = (without_gradient | ~tokens).all(dim=1)
            clamped = (clamped & tokens).any(dim=1)
        if not is_exact:
            clamped = torch.zeros_like(without_gradient)
        return clamped, without_gradient & ~clamped

    return Bonus(value, saturation)
