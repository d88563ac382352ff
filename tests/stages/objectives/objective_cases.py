"""The whole registry as test cases: a new row in DESIGNS is tested by being there."""

import torch

from stages.objectives.bonuses import exploratory_bonus
from stages.objectives.designs import DESIGNS
from stages.objectives.divergences import DIVERGENCES
from stages.objectives.params import ObjectiveParams, undefined

BETA = 0.125
ALL_DIVERGENCES = (*DIVERGENCES, 0.25, 0.75)


DEFINED = [
    (design, divergence)
    for design in DESIGNS
    for divergence in ALL_DIVERGENCES
    if undefined(design, divergence) is None
]
REFUSED = [
    (design, divergence)
    for design in DESIGNS
    for divergence in ALL_DIVERGENCES
    if undefined(design, divergence)
]


def evaluated(logp, design, divergence, ref_logp=None, **more):
    """`exploratory_bonus` with β and a reference (0.75 log π − ⅜ unless given)."""
    if ref_logp is None:
        ref_logp = 0.75 * logp.detach() - 0.375
    shapes = {name: more.pop(name) for name in ("mask", "num_tokens") if name in more}
    params = ObjectiveParams(design=design, divergence=divergence, beta=BETA, **more)
    return exploratory_bonus(logp, ref_logp, params, **shapes)


def bonus_of(logp, *arguments, **more):
    """L_bonus of each response; see `evaluated`."""
    return evaluated(logp, *arguments, **more).value


def bonus_and_gradient(logp, *arguments, **more):
    """Bonus and d(Σ bonus)/d log π; see `evaluated`."""
    leaf = logp.detach().clone().requires_grad_()
    bonus = bonus_of(leaf, *arguments, **more)
    (gradient,) = torch.autograd.grad(bonus.sum(), leaf)
    return bonus.detach(), gradient


def saturation_of(logp, *arguments, **more):
    """Masks of the responses that have a clamped bonus, or one without gradient."""
    return evaluated(logp.detach().clone().requires_grad_(), *arguments, **more).saturation()
