"""Iterative online preference learning on a bandit: all methods and seeds in one tensor program.

Shapes: `C` cells (method × divergence × κ), `S` seeds, `N` arms, `R` rollouts, `P` = R/2 pairs.
Everything is float64: a reference floor of 1e-12 is below float32's resolution of a sum near one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from stages.bandit.params import BanditParams, LandscapeParams
from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.objectives.bonuses import exploratory_bonus
from stages.objectives.designs import DESIGNS
from stages.objectives.divergences import DIVERGENCES
from stages.objectives.objective import preference_loss

RANDOM_BLOCK = 100
"""Iterations whose random numbers are drawn at once."""


@dataclass(frozen=True)
class Cell:
    """One method under one divergence with one κ."""

    method: str
    divergence: str
    kappa: float


def cells(params: BanditParams) -> list[Cell]:
    """Every combination that is defined, grouped by divergence, then method; f-DPO has no κ."""
    return [
        Cell(method, divergence, kappa)
        for divergence in params.divergences
        for method in params.methods
        if DESIGNS[method].refuses(DIVERGENCES[divergence]) is None
        for kappa in ((0.0,) if method == "none" else params.kappas)
    ]


class Landscape(NamedTuple):
    """A bandit."""

    reference: Tensor
    """Probabilities of the initial policy, [N] in float64."""
    rewards: Tensor
    """Reward of each arm, [N]."""
    best_region: Tensor
    """Booleans [N], arms that pay more than the local optimum."""
    best_arm: int
    """The arm that pays most."""


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
    reference = reference / reference.sum()
    return Landscape(reference, rewards, rewards > params.local_reward, params.best_arm)


@dataclass
class Outcome:
    """Results of every cell and seed."""

    steps: list[int]
    """The recorded iterations, [K]."""
    best_mass: Tensor
    """Probability of the best region after those, [C, S, K]."""
    policy: Tensor
    """The final policies, [C, S, N]."""
    reward: Tensor
    """Their expected reward, [C, S]."""


def simulate(
    params: BanditParams,
    landscape: Landscape,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run every cell with every seed; UserError if a cell's policy is no number any more.

    A cell's result depends neither on the other cells nor on the number of seeds: all cells of a
    seed get the same uniform random numbers, from that seed's own generator.
    """
    every = cells(params)
    logits = landscape.reference.log().expand(len(every), params.num_seeds, -1).clone()
    initial = policy = logits.softmax(dim=-1)
    optimizer_type = torch.optim.Adam if params.optimizer == "adam" else torch.optim.SGD
    # Both are elementwise, so one optimizer of all logits is one optimizer per policy.
    optimizer = optimizer_type([logits], lr=params.learning_rate, fused=True)
    steps: list[int] = []
    best_mass: list[Tensor] = []
    for iteration, uniform in enumerate(_uniforms(params, seed), start=1):
        arms = sample(policy, uniform)
        logp = policy.gather(-1, arms).log()
        ref_logp = logp if params.reference == "previous" else initial.gather(-1, arms).log()
        pull = rollouts_gradient(params, every, logp, ref_logp, landscape.rewards[arms])
        logits.grad = logits_gradient(pull, arms, policy, max_norm=params.max_grad_norm)
        optimizer.step()
        policy = logits.softmax(dim=-1)
        if iteration % params.record_every == 0 or iteration == params.num_iterations:
            _require_finite(every, policy, iteration)
            steps.append(iteration)
            best_mass.append(policy[..., landscape.best_region].sum(dim=-1))
            progress(iteration)
    return Outcome(steps, torch.stack(best_mass, dim=-1), policy, policy @ landscape.rewards)


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


def rollouts_gradient(
    params: BanditParams, every: Sequence[Cell], logp: Tensor, ref_logp: Tensor, rewards: Tensor
) -> Tensor:
    """∂(mean loss)/∂log π of each rollout, from its log π, log π_ref and reward: all [C, S, R]."""
    leaf = logp.detach().requires_grad_()
    swapped = rewards[..., 1::2] > rewards[..., 0::2]
    tie = rewards[..., 1::2] == rewards[..., 0::2]
    # Neighbouring cells of one method under one divergence are computed together.
    groups = [list(each) for _, each in groupby(every, attrgetter("divergence", "method"))]
    sizes = [len(group) for group in groups]
    parts = (each.split(sizes) for each in (leaf, ref_logp, swapped, tie))
    loss = torch.cat([_losses(params, *part) for part in zip(groups, *parts, strict=True)])
    if params.ties == "drop":
        loss = loss.masked_fill(tie, 0.0) / (~tie).sum(dim=-1, keepdim=True).clamp(min=1)
    else:
        loss = loss / loss.shape[-1]
    (pull,) = torch.autograd.grad(loss.sum(), leaf)
    return pull


def _losses(
    params: BanditParams,
    group: Sequence[Cell],
    logp: Tensor,
    ref_logp: Tensor,
    swapped: Tensor,
    tie: Tensor,
) -> Tensor:
    """Loss of every pair of cells that differ in κ alone, [C, S, P]; a tie has its bonus only."""
    logps = _sides(logp, swapped)
    ref_logps = _sides(ref_logp, swapped)
    divergence = group[0].divergence
    method = group[0].method
    preference = preference_loss(
        *(logps - ref_logps).unbind(dim=2), beta=params.beta, divergence=divergence
    )
    sides = {"rejected": slice(1, 2), "chosen": slice(0, 1), "all": slice(2)}[params.bonus_on]
    targets = logps[:, :, sides]
    bonus = exploratory_bonus(
        targets.flatten(),
        ref_logps[:, :, sides].flatten(),
        design=method,
        divergence=divergence,
        numerics=params.numerics,
        beta=params.beta,
    )
    kappa = torch.tensor([cell.kappa for cell in group], dtype=torch.float64)[:, None, None]
    return preference.masked_fill(tie, 0.0) - kappa * bonus.value.view_as(targets).mean(dim=2)


def _sides(values: Tensor, swapped: Tensor) -> Tensor:
    """Chosen and rejected of each pair, [C, S, 2, P]; the second is chosen if `swapped`."""
    first = values[..., 0::2]
    second = values[..., 1::2]
    sides = torch.where(swapped, second, first), torch.where(swapped, first, second)
    return torch.stack(sides, dim=2)


def logits_gradient(pull: Tensor, arms: Tensor, policy: Tensor, *, max_norm: float) -> Tensor:
    """Gradient with respect to softmax logits: Σ_r pull_r (onehot(arm_r) − π), [C, S, N].

    It is worked out in units of the largest pull: the square of 1/π under reverse KL, which a norm
    takes, may have no float.

    Args:
        pull: ∂loss/∂log π of each rollout, [C, S, R].
        arms: the rollouts, [C, S, R].
        policy: probabilities [C, S, N].
        max_norm: norm that each policy's gradient is scaled down to; 0 never scales.
    """
    tiny = torch.finfo(pull.dtype).tiny
    unit = pull.abs().amax(dim=-1, keepdim=True).clamp(min=tiny)
    pull = pull / unit
    gradient = torch.mul(policy, -pull.sum(dim=-1, keepdim=True)).scatter_add_(-1, arms, pull)
    if max_norm == 0.0:
        return gradient.mul_(unit)
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).clamp(min=tiny)
    return gradient.mul_(torch.minimum(unit, max_norm / norm))


def sample(policy: Tensor, uniform: Tensor) -> Tensor:
    """Arms [C, S, R] drawn by inverting the distribution function of ``policy``, [C, S, N].

    ``uniform``, [S, R], are random numbers in [0, 1), shared by all cells.
    """
    cumulative = policy.cumsum(dim=-1)
    levels = uniform * cumulative[..., -1:]
    return torch.searchsorted(cumulative, levels, right=True).clamp(max=policy.shape[-1] - 1)


def _uniforms(params: BanditParams, seed: int) -> Iterator[Tensor]:
    """Random numbers [S, R] of each iteration."""
    generators = [
        torch.Generator().manual_seed(derive_seed(seed, "bandit", repetition))
        for repetition in range(params.num_seeds)
    ]
    for start in range(0, params.num_iterations, RANDOM_BLOCK):
        size = (RANDOM_BLOCK, params.num_rollouts)
        blocks = [torch.rand(size, generator=each, dtype=torch.float64) for each in generators]
        yield from torch.stack(blocks, dim=1)[: params.num_iterations - start]
