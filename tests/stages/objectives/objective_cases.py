"""The whole registry as test cases: a new row in DESIGNS is tested by being there."""

import torch
from torch import Tensor

from stages.objectives import DESIGNS, DIVERGENCES, Bonus, BonusInputs, exploratory_bonus
from stages.objectives.bonuses import BonusSaturation
from stages.objectives.designs import check_design
from stages.objectives.divergences import resolve_divergence

BETA = 0.125
ALL_DIVERGENCES: tuple[str | float, ...] = (*DIVERGENCES, 0.25, 0.75)


def _is_defined(design: str, divergence: str | float) -> bool:
    return DESIGNS[design].refuses(resolve_divergence(divergence)) is None


DEFINED = [
    (design, divergence)
    for design in DESIGNS
    for divergence in ALL_DIVERGENCES
    if _is_defined(design, divergence)
]
REFUSED = [
    (design, divergence)
    for design in DESIGNS
    for divergence in ALL_DIVERGENCES
    if not _is_defined(design, divergence)
]


def bonus_of(
    logp: Tensor,
    design: str,
    divergence: str | float,
    ref_logp: Tensor | None = None,
    **more: object,
) -> Tensor:
    """`exploratory_bonus` with β and a reference (0.75 log π − ⅜ unless given)."""
    check_design(design, resolve_divergence(divergence))
    if ref_logp is None:
        ref_logp = 0.75 * logp.detach() - 0.375
    return exploratory_bonus(
        logp, design=design, divergence=divergence, ref_logp=ref_logp, beta=BETA, **more
    )


def bonus_and_gradient(
    logp: Tensor, design: str, divergence: str | float, **more: object
) -> tuple[Tensor, Tensor]:
    """Bonus and d(Σ bonus)/d log π."""
    leaf = logp.detach().clone().requires_grad_()
    bonus = bonus_of(leaf, design, divergence, **more)
    (gradient,) = torch.autograd.grad(bonus.sum(), leaf)
    return bonus.detach(), gradient


def saturation_of(
    logp: Tensor,
    design: str,
    divergence: str | float,
    *,
    ref_logp: Tensor | None = None,
    num_tokens: Tensor | None = None,
    mask: Tensor | None = None,
    **more: object,
) -> BonusSaturation:
    """Mask of the responses that have a clamped bonus, or one without gradient."""
    leaf = logp.detach().clone().requires_grad_()
    bonus = Bonus.of(design, divergence, **more)
    return bonus(BonusInputs(leaf, ref_logp, num_tokens, mask)).saturation()
