"""Preference losses: what each makes of the margin of two implicit rewards.

Shapes: `B` pairs. z = β (f′_w − f′_l) is the margin; g = η (r_w − r_l) is the scaled margin of the
oracle's scores.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

PreferenceLoss = Callable[[Tensor, float, Tensor | None], Tensor]
"""(z [B], β, g [B] or None) → losses [B]."""


def sigmoid(margin: Tensor, beta: float, gap: Tensor | None) -> Tensor:
    """−log σ(z): DPO (arXiv 2305.18290), f-DPO (arXiv 2309.16240)."""
    return -F.logsigmoid(margin)


def ipo(margin: Tensor, beta: float, gap: Tensor | None) -> Tensor:
    """((z − ½)/β)²: IPO (arXiv 2310.12036, Eq. 17), whose τ is β."""
    return ((margin - 0.5) / beta) ** 2


def rpo(margin: Tensor, beta: float, gap: Tensor | None) -> Tensor:
    """KL(σ(g) ‖ σ(z)): reward-aware preference optimisation (arXiv 2406.11704, section 3.3)."""
    assert gap is not None, "pairs have scores"
    return torch.sigmoid(gap) * (F.logsigmoid(gap) - F.logsigmoid(margin)) + torch.sigmoid(-gap) * (
        F.logsigmoid(-gap) - F.logsigmoid(-margin)
    )


def rebel(margin: Tensor, beta: float, gap: Tensor | None) -> Tensor:
    """(z − g)²: REBEL (arXiv 2404.16767, Eq. 1), whose 1/η is β."""
    assert gap is not None, "pairs have scores"
    return (margin - gap) ** 2


LOSSES: dict[str, PreferenceLoss] = {"sigmoid": sigmoid, "ipo": ipo, "rpo": rpo, "rebel": rebel}
"""Every preference loss by name; docs/equations.md has their equations."""
