"""The paper's toy experiment: a bandit whose best arm lies where the reference rarely plays.

Shapes: `C` cells (method × divergence × κ), `S` seeds, `N` arms, `R` rollouts, `P` = R/2 pairs.
Everything is float64: a reference floor of 1e-12 is below float32's resolution of a sum near one.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from pydantic import Field, PositiveFloat
from torch import Tensor

from flows.report.statistics import over_seeds
from flows.report.table import FittedTable
from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.contract.params import Settings
from stages.objectives.bonuses import exploratory_bonus
from stages.objectives.designs import DESIGNS
from stages.objectives.divergences import DIVERGENCES
from stages.objectives.objective import preference_loss

LABELS = {
    "none": "f-DPO",
    "feb": "FEB",
    "selm": "SELM",
    "xpo": "XPO",
    "vpo": "VPO",
    "se_popo": "SE-POPO",
    "one_minus_pi": "GEB 1+α−π",
    "inverse_pi": "GEB 1/π",
    "arctanh": "GEB arctanh(1−π)+α",
}
"""Methods that are compared, in the order of the table."""
GEB = ("one_minus_pi", "inverse_pi", "arctanh")
DIVERGENCE_LABELS = {
    "reverse_kl": "reverse KL",
    "hellinger": "Hellinger",
    "forward_kl": "forward KL",
}
LINE_STYLES = {"reverse_kl": "-", "hellinger": "--", "forward_kl": ":"}
SIDES = {"rejected": slice(1, 2), "chosen": slice(0, 1), "all": slice(2)}

NUM_ARMS = 1000
REFERENCE_ARM = 300
BEST_ARM = 750
WIDTH = 60.0
"""Standard deviation of every bump, in arms."""
LOCAL_REWARD = 0.6
RECORD_EVERY = 50
"""Iterations between two records of the best region; the precision of "found after"."""
SMALLEST_SHOWN = 1e-7
"""Lower end of the axis of probabilities."""
BIN = 20
"""Arms whose probabilities are one point of the figure: single arms are noisy."""
REWARD_COLOUR = "C1"
HEADER = (
    "divergence",
    "method",
    "κ",
    "best arm likeliest",
    "in best region",
    "expected reward",
    "found after",
)


class BanditSettings(Settings):
    """Settings of the simulation that the paper does not give (results/bandit/README.md)."""

    methods: tuple[str, ...] = tuple(LABELS)
    """Exploratory bonuses to compare; `none` is f-DPO."""
    divergences: tuple[str, ...] = tuple(DIVERGENCE_LABELS)
    """Divergences; a method that is not defined under one is left out there."""
    kappas: tuple[PositiveFloat, ...] = Field((0.1, 1.0, 10.0), min_length=1)
    """Values of κ, one cell each; f-DPO has none."""
    numerics: Literal["exact", "paper"] = "exact"
    """`paper` uses the published code's ε forms."""
    bonus_on: Literal["rejected", "all", "chosen"] = "rejected"
    """Rollouts that get the bonus."""
    beta: float = Field(0.1, gt=0)
    """β of the preference loss."""
    num_seeds: int = Field(10, ge=1)
    """Repetitions. A repetition's random numbers are the same for every method."""
    num_iterations: int = Field(5000, ge=1)
    """Iterations: one batch of rollouts and one update of the policy each."""
    num_rollouts: int = Field(64, ge=2, multiple_of=2)
    """Rollouts per iteration; neighbours make a pair."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the logits."""
    learning_rate: float = Field(1e-2, gt=0)
    """Learning rate, constant."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Each policy's gradient is scaled down to this norm; 0 never scales."""
    ties: Literal["keep", "drop"] = "keep"
    """Pairs of equal reward: only their bonus counts, or nothing of them."""
    reference: Literal["previous", "initial"] = "previous"
    """π_ref of an iteration: the policy that made its rollouts, or the one at the start."""
    reference_floor: float = Field(1e-6, gt=0)
    """Added to every arm's reference probability before normalising."""


@dataclass(frozen=True)
class BanditCell:
    """One method under one divergence with one κ."""

    method: str
    divergence: str
    kappa: float


def bandit_cells(settings: BanditSettings) -> list[BanditCell]:
    """Every combination that is defined, grouped by divergence, then method; f-DPO has no κ.

    Raises:
        UserError: A name is unknown, or no combination is defined.
    """
    for names, labels in ((settings.methods, LABELS), (settings.divergences, DIVERGENCE_LABELS)):
        unknown = set(names) - labels.keys()
        if unknown:
            raise UserError(f"the bandit has no {sorted(unknown)}", f"use some of {list(labels)}")
    cells: list[BanditCell] = []
    for divergence in settings.divergences:
        for method in settings.methods:
            if DESIGNS[method].refuses(DIVERGENCES[divergence]) is None:
                kappas = (0.0,) if method == "none" else settings.kappas
                cells += [BanditCell(method, divergence, kappa) for kappa in kappas]
    if not cells:
        raise UserError(
            f"none of the methods {settings.methods} is defined under {settings.divergences}",
            "add `reverse_kl` to the divergences, or a method that extends to the others",
        )
    return cells


class Landscape(NamedTuple):
    """A bandit."""

    reference: Tensor
    """Probabilities of the initial policy, [N]."""
    rewards: Tensor
    """Reward of each arm, [N]; above ``LOCAL_REWARD`` in the best region."""


def make_landscape(reference_floor: float) -> Landscape:
    """The paper's setting: a reference around one arm, the best arm far from it (Figure 5)."""
    arms = torch.arange(NUM_ARMS, dtype=torch.float64)
    local = torch.exp(-0.5 * ((arms - REFERENCE_ARM) / WIDTH) ** 2)
    best = torch.exp(-0.5 * ((arms - BEST_ARM) / WIDTH) ** 2)
    reference = local / local.sum() + reference_floor
    return Landscape(reference / reference.sum(), torch.maximum(LOCAL_REWARD * local, best))


@dataclass
class Outcome:
    """Results of every cell and seed."""

    steps: list[int]
    """The recorded iterations."""
    best_mass: Tensor
    """Probability of the best region after each of them, [C, S, len(steps)]."""
    policy: Tensor
    """The final policies, [C, S, N]."""


def simulate(
    settings: BanditSettings,
    landscape: Landscape,
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run every cell with every seed; UserError if a cell's policy is not finite any more.

    A cell's result depends neither on the other cells nor on the number of seeds: all cells of a
    seed get the same uniform random numbers, from that seed's own generator.
    """
    cells = bandit_cells(settings)
    best_region = landscape.rewards > LOCAL_REWARD
    logits = landscape.reference.log().expand(len(cells), settings.num_seeds, -1).clone()
    initial = policy = logits.softmax(dim=-1)
    optimizer_type = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.SGD
    # Both are elementwise, so one optimizer of all logits is one optimizer per policy.
    optimizer = optimizer_type([logits], lr=settings.learning_rate, fused=True)
    steps: list[int] = []
    best_mass: list[Tensor] = []
    for iteration, uniform in enumerate(_uniforms(settings), start=1):
        arms = sample(policy, uniform)
        logp = policy.gather(-1, arms).log()
        ref_logp = logp if settings.reference == "previous" else initial.gather(-1, arms).log()
        pull = rollouts_gradient(settings, cells, logp, ref_logp, landscape.rewards[arms])
        logits.grad = logits_gradient(pull, arms, policy, max_norm=settings.max_grad_norm)
        optimizer.step()
        policy = logits.softmax(dim=-1)
        if iteration % RECORD_EVERY == 0 or iteration == settings.num_iterations:
            _require_finite(cells, policy, iteration)
            steps.append(iteration)
            best_mass.append(policy[..., best_region].sum(dim=-1))
            progress(iteration)
    return Outcome(steps, torch.stack(best_mass, dim=-1), policy)


def _require_finite(cells: Sequence[BanditCell], policy: Tensor, iteration: int) -> None:
    diverged = (~policy.isfinite()).any(dim=(1, 2)).nonzero().flatten().tolist()
    if diverged:
        raise UserError(
            f"{len(diverged)} of {len(cells)} cells have no policy after {iteration} iterations, "
            f"the first {cells[diverged[0]]}: its probabilities are not numbers",
            "set `numerics=exact`, lower `learning_rate`, or leave these cells out",
        )


def rollouts_gradient(
    settings: BanditSettings,
    cells: Sequence[BanditCell],
    logp: Tensor,
    ref_logp: Tensor,
    rewards: Tensor,
) -> Tensor:
    """∂(mean loss)/∂log π of each rollout, from its log π, log π_ref and reward: all [C, S, R]."""
    leaf = logp.detach().requires_grad_()
    swapped = rewards[..., 1::2] > rewards[..., 0::2]
    tie = rewards[..., 1::2] == rewards[..., 0::2]
    # Neighbouring cells of one method under one divergence are computed together.
    groups = [list(group) for _, group in groupby(cells, attrgetter("divergence", "method"))]
    sizes = [len(group) for group in groups]
    parts = (tensor.split(sizes) for tensor in (leaf, ref_logp, swapped, tie))
    loss = torch.cat([_losses(settings, *part) for part in zip(groups, *parts, strict=True)])
    if settings.ties == "drop":
        loss = loss.masked_fill(tie, 0.0) / (~tie).sum(dim=-1, keepdim=True).clamp(min=1)
    else:
        loss = loss / loss.shape[-1]
    (pull,) = torch.autograd.grad(loss.sum(), leaf)
    return pull


def _losses(
    settings: BanditSettings,
    group: Sequence[BanditCell],
    logp: Tensor,
    ref_logp: Tensor,
    swapped: Tensor,
    tie: Tensor,
) -> Tensor:
    """Loss of every pair of cells that differ in κ alone, [C, S, P]; a tie has its bonus only."""
    logps = _sides(logp, swapped)
    ref_logps = _sides(ref_logp, swapped)
    divergence = group[0].divergence
    preference = preference_loss(
        *(logps - ref_logps).unbind(dim=2), beta=settings.beta, divergence=divergence
    )
    targets = logps[:, :, SIDES[settings.bonus_on]]
    bonus = exploratory_bonus(
        targets.flatten(),
        ref_logps[:, :, SIDES[settings.bonus_on]].flatten(),
        design=group[0].method,
        divergence=divergence,
        numerics=settings.numerics,
        beta=settings.beta,
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


def _uniforms(settings: BanditSettings) -> Iterator[Tensor]:
    """Random numbers [S, R] of each iteration."""
    base = derive_seed(0, "bandit")
    generators = [
        torch.Generator().manual_seed(derive_seed(base, "bandit", repetition))
        for repetition in range(settings.num_seeds)
    ]
    size = settings.num_rollouts
    for _ in range(settings.num_iterations):
        rows = [torch.rand(size, generator=seed, dtype=torch.float64) for seed in generators]
        yield torch.stack(rows)


def table(settings: BanditSettings, outcome: Outcome, landscape: Landscape) -> FittedTable:
    """A row for each cell.

    "In best region" means that arms better than the local optimum have most of the final policy's
    probability; "found after" is the first recorded iteration from which that stays so.
    """
    best_arm = landscape.rewards.argmax()
    is_likeliest = (outcome.policy.argmax(dim=-1) == best_arm).double().mean(dim=1).tolist()
    in_region = (outcome.best_mass[..., -1] > 0.5).double().mean(dim=1).tolist()
    rewards = (outcome.policy @ landscape.rewards).tolist()
    rows: list[list[str]] = []
    for index, cell in enumerate(bandit_cells(settings)):
        reward = over_seeds(rewards[index])
        half_width = "" if reward.high is None else f" ± {reward.high - reward.value:.3f}"
        firsts = [_found_after(outcome.steps, mass) for mass in outcome.best_mass[index].tolist()]
        found_after = [first for first in firsts if first is not None]
        row = [
            DIVERGENCE_LABELS[cell.divergence],
            LABELS[cell.method],
            f"{cell.kappa:g}" if cell.kappa else "–",
            f"{is_likeliest[index]:.0%}",
            f"{in_region[index]:.0%}",
            f"{reward.value:.3f}{half_width}",
            f"{statistics.median(found_after):.0f}" if found_after else "–",
        ]
        rows.append(row)
    return FittedTable("", HEADER, rows, kept=len(HEADER), left=2)


def _found_after(steps: Sequence[int], mass: Sequence[float]) -> int | None:
    """First recorded iteration from which the best region keeps more than half of the mass."""
    first = None
    for step, value in zip(reversed(steps), reversed(mass), strict=True):
        if value <= 0.5:
            break
        first = step
    return first


def reference_figure(landscape: Landscape) -> Figure:
    """The reference's distribution and the rewards (the paper's Figure 5)."""
    figure = Figure(figsize=(4.6, 2.8), layout="constrained")
    axes = figure.add_subplot(yscale="log", xlabel="arm", ylabel="probability")
    axes.plot(landscape.reference, label="reference")
    rewards = axes.twinx()
    rewards.plot(landscape.rewards, color=REWARD_COLOUR, label="reward")
    rewards.set_ylabel("reward")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def policies_figure(settings: BanditSettings, outcome: Outcome) -> Figure:
    """Final policies without and with GEB, first seed, largest κ (the paper's Figure 4)."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    largest = max(settings.kappas)
    centres = torch.arange(BIN // 2, NUM_ARMS, BIN)
    for cell, policy in zip(bandit_cells(settings), outcome.policy[:, 0], strict=True):
        if cell.method == "none" or (cell.method in GEB and cell.kappa == largest):
            panels[int(cell.method in GEB)].plot(
                centres,
                policy.view(-1, BIN).sum(dim=1),
                color=f"C{list(LABELS).index(cell.method)}",
                linestyle=LINE_STYLES[cell.divergence],
                label=f"{LABELS[cell.method]}, {DIVERGENCE_LABELS[cell.divergence]}",
            )
    for axes, title in zip(panels, ("f-DPO", f"GEB, κ = {largest:g}"), strict=True):
        axes.axvline(BEST_ARM, color=REWARD_COLOUR, linewidth=0.8, alpha=0.6)
        axes.set(yscale="log", ylim=(SMALLEST_SHOWN, 2.0), title=title, xlabel="arm")
    panels[0].set_ylabel(f"probability per {BIN} arms")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    return figure
