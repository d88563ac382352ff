"""The paper's toy experiment: a bandit whose best arm lies where the reference rarely plays.

Shapes: `G` games (method × divergence), `K` values of κ, `S` seeds, `N` arms, `R` rollouts and
`P` = R/2 pairs. Everything is float64: a reference floor of 1e-6 is near float32's resolution.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
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
LINE_STYLES = {
    "reverse_kl": "-",
    "hellinger": "--",
    "forward_kl": ":",
}
GAMES = [
    (method, divergence)
    for divergence in DIVERGENCE_LABELS
    for method in LABELS
    if undefined(method, divergence) is None
]
"""Every combination that is defined, grouped by divergence."""
KAPPAS = (0.1, 1.0, 10.0)
"""Weights of the bonus; f-DPO has none."""
HEADER = (
    "divergence",
    "method",
    "κ",
    "best arm likeliest",
    "in best region",
    "expected reward",
    "found after",
)

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
MAX_GRAD_NORM = 1.0
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


def simulate(
    num_seeds: int, num_iterations: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[Tensor, Tensor]:
    """Plays every game with every κ and seed; all of a seed get the same random numbers.

    Returns:
        The final policies, [G, K, S, N], and the best region's probability in each record,
        [G, K, S, records].
    """
    logits = REFERENCE.log().repeat(len(GAMES), len(KAPPAS), num_seeds, 1).requires_grad_()
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
        rollouts = logps.gather(-1, arms)
        losses = []
        for game, game_rollouts, game_arms in zip(GAMES, rollouts, arms, strict=True):
            losses.append(loss(*game, game_rollouts, REWARDS[game_arms]))
        total = torch.stack(losses).sum()
        (gradient,) = torch.autograd.grad(total, logits)
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        logits.grad = gradient / (norm / MAX_GRAD_NORM).clamp(min=1.0)
        optimizer.step()
        if iteration % RECORD_EVERY == 0:
            policy = logits.detach().softmax(dim=-1)
            best_mass.append(policy[..., REWARDS > LOCAL_REWARD].sum(dim=-1))
            progress(iteration)
    policy = logits.detach().softmax(dim=-1)
    return policy, torch.stack(best_mass, dim=-1)


def sample(policy: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Arms [G, K, S, R] drawn by inverting the distribution function of each policy."""
    draws = []
    for generator in generators:
        draws.append(torch.rand(NUM_ROLLOUTS, generator=generator, dtype=torch.float64))
    cumulative = policy.cumsum(dim=-1)
    levels = torch.stack(draws) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, levels, right=True).clamp(max=NUM_ARMS - 1)


def loss(method: str, divergence: str, logp: Tensor, rewards: Tensor) -> Tensor:
    """Mean loss of one game's pairs, [K, S], from log π and reward of its rollouts, [K, S, R].

    Neighbours make a pair. π_ref is the policy itself. A tied pair has its bonus only.
    """
    in_pairs = (-1, 2)
    pairs = logp.unflatten(-1, in_pairs)
    first, second = rewards.unflatten(-1, in_pairs).unbind(dim=-1)
    chosen = (second > first).long()[..., None]
    winner = pairs.gather(-1, chosen).squeeze(-1)
    loser = pairs.gather(-1, 1 - chosen).squeeze(-1)
    preference = preference_loss(
        winner - winner.detach(), loser - loser.detach(), beta=BETA, divergence=divergence
    )
    params = ObjectiveParams.model_validate(
        {"design": method, "divergence": divergence, "beta": BETA}
    )
    bonus = exploratory_bonus(loser.flatten(), loser.detach().flatten(), params)
    kappa = torch.tensor(KAPPAS, dtype=torch.float64)[:, None, None]
    losses = preference.masked_fill(first == second, 0.0) - kappa * bonus.value.view_as(loser)
    return losses.mean(dim=-1)


def table(policy: Tensor, best_mass: Tensor) -> FittedTable:
    """A row for each game and κ; f-DPO has no κ.

    "In best region": better arms than the local optimum have most of the final policy's
    probability. "Found after": the iteration from which that stays so, a median over seeds.
    """
    rows = []
    for game, (method, divergence) in enumerate(GAMES):
        labels = [DIVERGENCE_LABELS[divergence], LABELS[method]]
        for place, kappa in enumerate(KAPPAS):
            outcome = _outcome(policy[game, place], best_mass[game, place])
            if method == "none":
                rows.append([*labels, "–", *outcome])
                break
            rows.append([*labels, f"{kappa:g}", *outcome])
    return FittedTable("", HEADER, rows, left=2)


def _outcome(policies: Tensor, best_mass: Tensor) -> list[str]:
    """Cells of one game and κ: its final policies, [S, N], and best region, [S, records]."""
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
        median = statistics.median(firsts.tolist())
        found_after = f"{RECORD_EVERY * median:.0f}"
    return [
        f"{finds_arm.double().mean():.0%}",
        f"{in_region[:, -1].double().mean():.0%}",
        f"{reward.value:.3f}{half_width}",
        found_after,
    ]


def figure(policy: Tensor) -> Figure:
    """Reference and rewards; final policies of f-DPO and GEB, first seed, largest κ (Figure 4)."""
    drawn = Figure(figsize=(12.0, 3.2), layout="constrained")
    panels = drawn.subplots(1, 3, sharey=True)
    setting, f_dpo, geb = panels
    setting.set_title("setting")
    f_dpo.set_title("f-DPO")
    geb.set_title(f"GEB, κ = {KAPPAS[-1]:g}")
    centres = torch.arange(BIN // 2, NUM_ARMS, BIN)
    setting.plot(centres, _binned(REFERENCE), color="black", label="reference")
    setting.plot(ARMS, REWARDS, color="C1", label="reward of an arm")
    for game, (method, divergence) in enumerate(GAMES):
        label = LABELS[method]
        if label.startswith(("f-DPO", "GEB")):
            axes = f_dpo if method == "none" else geb
            axes.plot(
                centres,
                _binned(policy[game, -1, 0]),
                color=f"C{list(LABELS).index(method)}",
                linestyle=LINE_STYLES[divergence],
                label=f"{label}, {DIVERGENCE_LABELS[divergence]}",
            )
    for axes in panels:
        axes.set(yscale="log", ylim=(1e-7, 2.0), xlabel="arm")
        axes.yaxis.set_major_formatter("{x:g}")
    setting.set_ylabel(f"probability per {BIN} arms")
    drawn.legend(loc="outside right center", frameon=False, fontsize=7)
    return drawn


def _binned(policy: Tensor) -> Tensor:
    return policy.view(-1, BIN).sum(dim=1)
