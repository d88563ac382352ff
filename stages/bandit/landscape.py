"""The bandit: what the reference plays and what the arms pay.

Shapes: `N` arms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.bandit.params import LandscapeParams


@dataclass(frozen=True)
class Landscape:
    """A bandit.

    Attributes:
        reference: probabilities of the initial policy, [N] in float64.
        rewards: what each arm pays, [N].
        best_region: booleans [N], arms that pay more than the local optimum.
        best_arm: the arm that pays most.
    """

    reference: Tensor
    rewards: Tensor
    best_region: Tensor
    best_arm: int


def make_landscape(params: LandscapeParams) -> Landscape:
    """The paper's setting: a reference around one arm, the best arm far from it (Figure 5)."""
    arms = torch.arange(params.num_arms, dtype=torch.float64)

    def bump(centre: int, width: float) -> Tensor:
        return torch.exp(-0.5 * ((arms - centre) / width) ** 2)

    reference = bump(params.reference_arm, params.reference_width)
    reference = reference / reference.sum() + params.reference_floor
    rewards = torch.maximum(
        params.local_reward * bump(params.reference_arm, params.reward_width),
        params.best_reward * bump(params.best_arm, params.reward_width),
    )
    return Landscape(
        reference=reference / reference.sum(),
        rewards=rewards,
        best_region=rewards > params.local_reward,
        best_arm=params.best_arm,
    )
