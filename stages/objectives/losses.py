"""The preference loss of f-DPO, per pair.

Shapes: `B` pairs.
"""

import torch.nn.functional as F
from torch import Tensor

from stages.objectives.divergences import implicit_reward


def preference_loss(
    chosen_logratio: Tensor,
    rejected_logratio: Tensor,
    *,
    beta: float,
    divergence: str | float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """f-DPO loss −log σ(β (f′_chosen − f′_rejected)) of each pair (arXiv 2309.16240).

    Label smoothing ε takes each label to be wrong with probability ε:
    −(1−ε) log σ(z) − ε log σ(−z), z the margin.

    Args:
        chosen_logratio: log π − log π_ref of the chosen responses, [B].
        rejected_logratio: the same of the rejected responses, [B].
        beta: β > 0, the strength of the divergence penalty.
        divergence: a name in `DIVERGENCES` or α in [0, 1].
        label_smoothing: ε in [0, 0.5].

    Returns:
        Losses [B], in float32 or float64.

    Raises:
        ValueError: shapes or dtypes differ, or a parameter is out of range.
    """
    check_loss_parameters(beta, label_smoothing)
    if (
        chosen_logratio.shape != rejected_logratio.shape
        or chosen_logratio.dtype != rejected_logratio.dtype
    ):
        raise ValueError(
            "chosen and rejected logratios must have one shape and dtype, got "
            f"{tuple(chosen_logratio.shape)} {chosen_logratio.dtype} and "
            f"{tuple(rejected_logratio.shape)} {rejected_logratio.dtype}"
        )
    chosen_reward = implicit_reward(chosen_logratio, divergence=divergence)
    rejected_reward = implicit_reward(rejected_logratio, divergence=divergence)
    margin = beta * (chosen_reward - rejected_reward)
    if label_smoothing == 0.0:
        return -F.logsigmoid(margin)
    return -(1.0 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def check_loss_parameters(beta: float, label_smoothing: float) -> None:
    """Raise ValueError unless β > 0 and 0 ≤ label smoothing ≤ ½."""
    if not beta > 0.0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not 0.0 <= label_smoothing <= 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5], got {label_smoothing}")
