"""Gradient of the bandit's losses, for all cells at once.

Shapes: `C` cells, `S` seeds, `N` arms, `R` rollouts, `P` = R/2 pairs; everything is float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from stages.bandit.cells import Cell
from stages.bandit.params import BanditParams
from stages.objectives import exploratory_bonus, preference_loss

Sides = tuple[Tensor, Tensor]
"""Something of the chosen and of the rejected rollouts of all pairs."""


def logits_gradient(pull: Tensor, arms: Tensor, policy: Tensor, *, max_norm: float) -> Tensor:
    """Gradient with respect to softmax logits from that with respect to the rollouts' log π.

    It is worked out in units of the largest pull: the square of 1/π under reverse KL, which a norm
    takes, may have no float.

    Args:
        pull: ∂loss/∂log π of each rollout, [C, S, R].
        arms: the rollouts, [C, S, R].
        policy: probabilities [C, S, N].
        max_norm: norm that each policy's gradient is scaled down to; 0 never scales.

    Returns:
        Σ_r pull_r (onehot(arm_r) − π), [C, S, N].
    """
    tiny = torch.finfo(pull.dtype).tiny
    unit = pull.abs().amax(dim=-1, keepdim=True).clamp(min=tiny)
    pull = pull / unit
    gradient = torch.mul(policy, -pull.sum(dim=-1, keepdim=True)).scatter_add_(-1, arms, pull)
    if max_norm == 0.0:
        return gradient.mul_(unit)
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).clamp(min=tiny)
    return gradient.mul_(torch.minimum(unit, max_norm / norm))


class Objective:
    """The gradient of all cells' losses; cells that share a design and divergence go together.

    Args:
        params: the experiment.
        every: its cells, grouped by divergence, then method.
    """

    def __init__(self, params: BanditParams, every: Sequence[Cell]) -> None:
        self._params = params
        self._groups = [
            (divergence, list(Counter(cell.method for cell in group).items()))
            for divergence, group in groupby(every, lambda cell: cell.divergence)
        ]
        self._kappa = torch.tensor([cell.kappa for cell in every], dtype=torch.float64)

    def gradient(self, logp: Tensor, ref_logp: Tensor, rewards: Tensor) -> Tensor:
        """∂(mean loss)/∂log π of each rollout; all [C, S, R]."""
        leaf = logp.detach().requires_grad_()
        swapped = rewards[..., 1::2] > rewards[..., 0::2]
        tie = rewards[..., 1::2] == rewards[..., 0::2]
        preference, bonus = self._terms(_sides(leaf, swapped), _sides(ref_logp, swapped))
        loss = preference.masked_fill(tie, 0.0) - self._kappa[:, None, None] * bonus
        if self._params.ties == "drop":
            num_counted = (~tie).sum(dim=-1, keepdim=True).clamp(min=1)
            loss = loss.masked_fill(tie, 0.0) / num_counted
        else:
            loss = loss / loss.shape[-1]
        (pull,) = torch.autograd.grad(loss.sum(), leaf)
        return pull

    def _terms(self, logps: Sides, ref_logps: Sides) -> tuple[Tensor, Tensor]:
        """Preference loss and bonus of every pair, both [C, S, P]."""
        sizes = [sum(count for _, count in methods) for _, methods in self._groups]
        sides = [part.split(sizes) for part in (*logps, *ref_logps)]
        preference, bonus = [], []
        for (divergence, methods), *parts in zip(self._groups, *sides, strict=True):
            chosen, rejected, ref_chosen, ref_rejected = parts
            preference.append(
                preference_loss(
                    chosen - ref_chosen,
                    rejected - ref_rejected,
                    beta=self._params.beta,
                    divergence=divergence,
                )
            )
            counts = [count for _, count in methods]
            by_method = [part.split(counts) for part in parts]
            for (method, _), *own in zip(methods, *by_method, strict=True):
                bonus.append(self._bonus(method, divergence, own))
        return torch.cat(preference), torch.cat(bonus)

    def _bonus(self, method: str, divergence: str, parts: Sequence[Tensor]) -> Tensor:
        chosen, rejected, ref_chosen, ref_rejected = parts
        targets = {
            "rejected": [(rejected, ref_rejected)],
            "chosen": [(chosen, ref_chosen)],
            "all": [(chosen, ref_chosen), (rejected, ref_rejected)],
        }[self._params.bonus_on]
        bonuses = [
            exploratory_bonus(
                logp.flatten(),
                design=method,
                divergence=divergence,
                ref_logp=ref_logp.flatten(),
                numerics=self._params.numerics,
                beta=self._params.beta,
            ).view_as(logp)
            for logp, ref_logp in targets
        ]
        return sum(bonuses[1:], start=bonuses[0]) / len(bonuses)


def _sides(values: Tensor, swapped: Tensor) -> Sides:
    """Chosen and rejected of each pair, [C, S, P] each; the second is chosen where `swapped`."""
    first, second = values[..., 0::2], values[..., 1::2]
    return torch.where(swapped, second, first), torch.where(swapped, first, second)
