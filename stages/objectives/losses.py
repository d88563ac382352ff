"""Preference losses: what each makes of the margin of two implicit rewards.

Shapes: `B` pairs. z = β (f′_w − f′_l) is the margin.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

PreferenceLoss = Callable[[Tensor, float], Tensor]
"""(z [B], β) → losses [B]."""


def sigmoid(margin: Tensor, beta: float) -> Tensor:
    """−log σ(z): DPO (arXiv 2305.18290), f-DPO (arXiv 2309.16240)."""
    return -F.logsigmoid(margin)


def ipo(margin: Tensor, beta: float) -> Tensor:
    """((z − ½)/β)²: IPO (arXiv 2310.12036, Eq. 17), whose τ is β."""
    return ((margin - 0.5) / beta) ** 2


LOSSES: dict[str, PreferenceLoss] = {"sigmoid": sigmoid, "ipo": ipo}
"""Every preference loss by name; docs/equations.md has their equations."""
