"""Iterative online preference learning on a bandit: all methods and seeds in one tensor program.

Shapes: `C` cells (method × divergence × κ), `S` seeds, `N` arms, `R` rollouts.
Everything is float64: a reference floor of 1e-12 is below float32's resolution of a sum near one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.bandit.cells import Cell, cells
from stages.bandit.landscape import Landscape
from stages.bandit.objective import Objective, logits_gradient
from stages.bandit.params import BanditParams
from stages.contract.digests import derive_seed
from stages.contract.errors import UserError

RANDOM_BLOCK = 100
"""Iterations whose random numbers are drawn at once."""


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
    objective = Objective(params, every)
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
