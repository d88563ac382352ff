"""Iterative online preference learning on a bandit: all methods and seeds in one tensor program.

Shapes: `C` cells (method × divergence × κ), `S` seeds, `N` arms, `R` rollouts, `P` = R/2 pairs.
Everything is float64: a reference floor of 1e-12 is below float32's resolution of a sum near one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from stages.bandit.landscape import Landscape
from stages.bandit.params import BanditParams
from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.objectives import DESIGNS, exploratory_bonus, preference_loss
from stages.objectives.divergences import resolve_divergence

RANDOM_BLOCK = 100
"""Iterations whose random numbers are drawn at once."""

Sides = tuple[Tensor, Tensor]
"""Something of the chosen and of the rejected rollouts of all pairs."""


@dataclass(frozen=True)
class Cell:
    """One method under one divergence with one κ."""

    method: str
    divergence: str
    kappa: float


@dataclass
class Outcome:
    """Results of every cell and seed.

    Attributes:
        steps: the iterations after which the curves have a point, [K].
        reward: expected reward of the policy at those, [C, S, K].
        best_mass: probability of the best region at those, [C, S, K].
        policy: the final policies, [C, S, N].
    """

    steps: list[int]
    reward: Tensor
    best_mass: Tensor
    policy: Tensor


@dataclass
class _Curves:
    steps: list[int] = field(default_factory=list)
    reward: list[Tensor] = field(default_factory=list)
    best_mass: list[Tensor] = field(default_factory=list)

    def add(self, step: int, policy: Tensor, landscape: Landscape) -> None:
        self.steps.append(step)
        self.reward.append(policy @ landscape.rewards)
        self.best_mass.append(policy[..., landscape.best_region].sum(dim=-1))


def cells(params: BanditParams) -> list[Cell]:
    """Every combination that is defined, grouped by divergence, then method; f-DPO has no κ."""
    return [
        Cell(method, divergence, kappa)
        for divergence in params.divergences
        for method in params.methods
        if DESIGNS[method].refuses(resolve_divergence(divergence)) is None
        for kappa in ((0.0,) if method == "none" else params.kappas)
    ]


def simulate(
    params: BanditParams,
    landscape: Landscape,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run every cell with every seed.

    A cell's result depends neither on the other cells nor on the number of seeds: all cells of a
    seed get the same uniform random numbers, from that seed's own generator.

    Args:
        params: the experiment.
        landscape: the bandit.
        seed: from which each repetition's seed is derived.
        progress: is told how many iterations are done.

    Raises:
        UserError: a cell's policy is no number any more.
    """
    every = cells(params)
    logits = landscape.reference.log().expand(len(every), params.num_seeds, -1).clone()
    initial = policy = logits.softmax(dim=-1)
    optimizer_type = torch.optim.Adam if params.optimizer == "adam" else torch.optim.SGD
    # Both are elementwise, so one optimizer of all logits is one optimizer per policy.
    optimizer = optimizer_type([logits], lr=params.learning_rate, fused=True)
    objective = _Objective(params, every)
    curves = _Curves()
    for iteration, uniform in enumerate(_uniforms(params, seed), start=1):
        arms = sample(policy, uniform)
        logp = policy.gather(-1, arms).log()
        ref_logp = logp if params.reference == "previous" else initial.gather(-1, arms).log()
        pull = objective.gradient(logp, ref_logp, landscape.rewards[arms])
        logits.grad = logits_gradient(pull, arms, policy, max_norm=params.max_grad_norm)
        optimizer.step()
        policy = logits.softmax(dim=-1)
        if iteration % params.record_every == 0 or iteration == params.num_iterations:
            _require_finite(every, policy, iteration)
            curves.add(iteration, policy, landscape)
            progress(iteration)
    return Outcome(
        steps=curves.steps,
        reward=torch.stack(curves.reward, dim=-1),
        best_mass=torch.stack(curves.best_mass, dim=-1),
        policy=policy,
    )


def _require_finite(every: Sequence[Cell], policy: Tensor, iteration: int) -> None:
    """Refuses policies [C, S, N] of which no figure could be told."""
    diverged = (~policy.isfinite()).any(dim=(1, 2)).nonzero().flatten().tolist()
    if diverged:
        cell = every[diverged[0]]
        raise UserError(
            f"{len(diverged)} of {len(every)} cells have no policy after {iteration} iterations, "
            f"the first {cell.method} under {cell.divergence} with κ = {cell.kappa:g}: its "
            "probabilities are not numbers",
            "set `bandit.numerics: exact`, lower `bandit.learning_rate`, or leave these cells out",
        )


def sample(policy: Tensor, uniform: Tensor) -> Tensor:
    """Arms drawn by inverting the distribution function.

    Args:
        policy: probabilities [C, S, N].
        uniform: random numbers in [0, 1), [S, R], shared by all cells.

    Returns:
        Arms [C, S, R].
    """
    cumulative = policy.cumsum(dim=-1)
    levels = uniform * cumulative[..., -1:]
    return torch.searchsorted(cumulative, levels, right=True).clamp(max=policy.shape[-1] - 1)


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


class _Objective:
    """The gradient of all cells' losses; cells that share a design and divergence go together."""

    def __init__(self, params: BanditParams, every: Sequence[Cell]) -> None:
        self._params = params
        self._groups = [
            (divergence, [(method, len(list(same))) for method, same in groupby(group, _method)])
            for divergence, group in groupby(every, lambda cell: cell.divergence)
        ]
        self._kappa = torch.tensor([cell.kappa for cell in every], dtype=torch.float64)

    def gradient(self, logp: Tensor, ref_logp: Tensor, rewards: Tensor) -> Tensor:
        """∂(mean loss)/∂log π of each rollout; all [C, S, R]."""
        leaf = logp.detach().requires_grad_()
        swapped = rewards[..., 1::2] > rewards[..., 0::2]
        tie = rewards[..., 1::2] == rewards[..., 0::2]
        chosen, rejected = _sides(leaf, swapped)
        ref_chosen, ref_rejected = _sides(ref_logp, swapped)
        terms = self._terms((chosen, rejected), (ref_chosen, ref_rejected))
        loss = terms.preference.masked_fill(tie, 0.0) - self._kappa[:, None, None] * terms.bonus
        if self._params.ties == "drop":
            num_counted = (~tie).sum(dim=-1, keepdim=True).clamp(min=1)
            loss = loss.masked_fill(tie, 0.0) / num_counted
        else:
            loss = loss / loss.shape[-1]
        (pull,) = torch.autograd.grad(loss.sum(), leaf)
        return pull

    def _terms(self, logps: Sides, ref_logps: Sides) -> _Terms:
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
        return _Terms(torch.cat(preference), torch.cat(bonus))

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


@dataclass(frozen=True)
class _Terms:
    preference: Tensor
    bonus: Tensor


def _sides(values: Tensor, swapped: Tensor) -> Sides:
    """Chosen and rejected of each pair, [C, S, P] each; the second is chosen where `swapped`."""
    first, second = values[..., 0::2], values[..., 1::2]
    return torch.where(swapped, second, first), torch.where(swapped, first, second)


def _method(cell: Cell) -> str:
    return cell.method


def _uniforms(params: BanditParams, seed: int) -> Iterator[Tensor]:
    """Random numbers [S, R] of each iteration."""
    generators = [
        torch.Generator().manual_seed(derive_seed(seed, "bandit", repetition))
        for repetition in range(params.num_seeds)
    ]
    for start in range(0, params.num_iterations, RANDOM_BLOCK):
        block = torch.stack(
            [
                torch.rand(
                    RANDOM_BLOCK, params.num_rollouts, generator=generator, dtype=torch.float64
                )
                for generator in generators
            ],
            dim=1,
        )
        yield from block[: params.num_iterations - start]
