"""The paper's toy experiment: a bandit whose best arm lies where the reference rarely plays.

Shapes: `S` seeds, `N` arms, `R` rollouts. Everything is float64: a reference floor of 1e-6 is near
float32's resolution.
"""

import statistics
from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flows.report.statistics import over_seeds
from flows.report.table import FittedTable
from stages.contract.digests import derive_seed
from stages.objectives.bonuses import exploratory_bonus
from stages.objectives.objective import preference_loss
from stages.objectives.params import ObjectiveParams, undefined

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
DIVERGENCE_LABELS = {
    "reverse_kl": "reverse KL",
    "hellinger": "Hellinger",
    "forward_kl": "forward KL",
}
KAPPAS = (0.1, 1.0, 10.0)
"""Weights of the bonus."""
Game = tuple[str, str, float]
"""A method, a divergence and a κ."""
GAMES: Sequence[Game] = [
    (method, divergence, kappa)
    for divergence in DIVERGENCE_LABELS
    for method in LABELS
    for kappa in ([0.0] if method == "none" else KAPPAS)
    if undefined(method, divergence) is None
]
"""Every combination that is defined, grouped by divergence; f-DPO has no bonus."""
Outcome = tuple[Tensor, Tensor]
"""Final policies, [S, N], and the best region's probability in each record, [S, records]."""

NUM_ARMS = 1000
REFERENCE_ARM = 300
BEST_ARM = 750
WIDTH = 60.0
"""Standard deviation of every bump, in arms."""
LOCAL_REWARD = 0.6
"""Reward of the reference's favourite arm; the best arm pays 1."""
REFERENCE_FLOOR = 1e-6
"""Added to the reference's probability of each arm."""
NUM_ROLLOUTS = 64
"""Rollouts of an iteration; neighbours make a pair."""
BETA = 0.1
LEARNING_RATE = 1e-2
RECORD_EVERY = 50
"""Iterations between two records of the best region; the precision of "found after"."""
BIN = 20
"""Arms whose probabilities are one point of the figure: single arms are noisy."""

ARMS = torch.arange(NUM_ARMS, dtype=torch.float64)
_LOCAL = torch.exp(-0.5 * ((ARMS - REFERENCE_ARM) / WIDTH) ** 2)
_BEST = torch.exp(-0.5 * ((ARMS - BEST_ARM) / WIDTH) ** 2)
_FLOORED = _LOCAL / _LOCAL.sum() + REFERENCE_FLOOR
REFERENCE = _FLOORED / _FLOORED.sum()
"""Probabilities of the initial policy, [N] (the paper's Figure 5)."""
REWARDS = torch.maximum(LOCAL_REWARD * _LOCAL, _BEST)
"""Reward of each arm, [N]; above ``LOCAL_REWARD`` in the best region."""


def simulate(game: Game, num_seeds: int, num_iterations: int) -> Outcome:
    """Plays a game with every seed; all games of a seed get the same random numbers."""
    # Several threads are slower on tensors of this size.
    torch.set_num_threads(1)
    logits = REFERENCE.log().repeat(num_seeds, 1).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE, fused=True)
    base = derive_seed(0, "bandit")
    generators = []
    for repetition in range(num_seeds):
        seed = derive_seed(base, "bandit", repetition)
        generators.append(torch.Generator().manual_seed(seed))
    best_mass = []
    for iteration in range(1, num_iterations + 1):
        logps = logits.log_softmax(dim=-1)
        arms = sample(logps.detach().exp(), generators)
        losses = loss(game, logps.gather(-1, arms), REWARDS[arms])
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        # Each policy's gradient is clipped to norm 1.
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        logits.grad = gradient / norm.clamp(min=1.0)
        optimizer.step()
        if iteration % RECORD_EVERY == 0:
            policies = logits.detach().softmax(dim=-1)
            best_mass.append(policies[:, REWARDS > LOCAL_REWARD].sum(dim=-1))
    return policies, torch.stack(best_mass, dim=-1)


def sample(policies: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Arms [S, R] drawn by inverting the distribution function of each policy, [S, N]."""
    draws = []
    for generator in generators:
        draws.append(torch.rand(NUM_ROLLOUTS, generator=generator, dtype=torch.float64))
    cumulative = policies.cumsum(dim=-1)
    levels = torch.stack(draws) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, levels, right=True).clamp(max=NUM_ARMS - 1)


def loss(game: Game, logp: Tensor, rewards: Tensor) -> Tensor:
    """Mean loss of a game's pairs, [S], from log π and reward of its rollouts, [S, R].

    Neighbours make a pair. π_ref is the policy itself. A tied pair has its bonus only.
    """
    method, divergence, kappa = game
    first = rewards[:, ::2]
    second = rewards[:, 1::2]
    second_wins = second > first
    winner = torch.where(second_wins, logp[:, 1::2], logp[:, ::2])
    loser = torch.where(second_wins, logp[:, ::2], logp[:, 1::2])
    preference = preference_loss(
        winner - winner.detach(), loser - loser.detach(), beta=BETA, divergence=divergence
    )
    params = ObjectiveParams.model_validate(
        {"design": method, "divergence": divergence, "beta": BETA}
    )
    bonus = exploratory_bonus(loser.flatten(), loser.detach().flatten(), params)
    losses = preference.masked_fill(first == second, 0.0) - kappa * bonus.value.view_as(loser)
    return losses.mean(dim=-1)


def table(outcomes: Mapping[Game, Outcome]) -> FittedTable:
    """A row for each game.

    "In best region": better arms than the local optimum have most of the final policy's
    probability. "Found after": the iteration from which that stays so, a median over seeds.
    """
    rows = []
    for (method, divergence, kappa), (policies, best_mass) in outcomes.items():
        finds_arm = policies.argmax(dim=-1) == BEST_ARM
        in_region = best_mass > 0.5
        rewards = policies @ REWARDS
        reward = over_seeds(rewards.tolist())
        half_width = "" if reward.high is None else f" ± {reward.high - reward.value:.3f}"
        # Records from which the best region keeps its mass, counted from the last one.
        lasting = in_region.flip(-1).long().cumprod(dim=-1).sum(dim=-1)
        firsts = in_region.shape[-1] + 1 - lasting[lasting > 0]
        found_after = "–"
        if len(firsts):
            found_after = f"{RECORD_EVERY * statistics.median(firsts.tolist()):.0f}"
        row = [
            DIVERGENCE_LABELS[divergence],
            LABELS[method],
            f"{kappa:g}" if kappa else "–",
            f"{finds_arm.double().mean():.0%}",
            f"{in_region[:, -1].double().mean():.0%}",
            f"{reward.value:.3f}{half_width}",
            found_after,
        ]
        rows.append(row)
    header = "divergence,method,κ,best arm likeliest,in best region,expected reward,found after"
    return FittedTable("", header.split(","), rows, left=2)


def figure(outcomes: Mapping[Game, Outcome]) -> Figure:
    """Policies of f-DPO and GEB with the largest κ, first seed, by divergence (Figure 4)."""
    drawn = Figure(figsize=(12.0, 3.2), layout="constrained")
    panels = dict(zip(DIVERGENCE_LABELS, drawn.subplots(1, 3, sharey=True), strict=True))
    for divergence, axes in panels.items():
        axes.set(title=DIVERGENCE_LABELS[divergence], xlabel="arm", yscale="log", ylim=(1e-7, 2.0))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.plot(ARMS, REWARDS, color="grey", label="reward of an arm")
        _draw(axes, REFERENCE, "reference")
    for (method, divergence, kappa), (policies, _) in outcomes.items():
        if method == "none" or (LABELS[method].startswith("GEB") and kappa == KAPPAS[-1]):
            _draw(panels[divergence], policies[0], LABELS[method])
    drawn.legend(handles=axes.lines, loc="outside right center", frameon=False, fontsize=7)
    panels["reverse_kl"].set_ylabel(f"probability per {BIN} arms")
    return drawn


def _draw(axes: Axes, policy: Tensor, label: str) -> None:
    axes.plot(ARMS[BIN // 2 :: BIN], policy.view(-1, BIN).sum(dim=1), label=label)
