"""From the outcome of the simulation to numbers, a table and the paper's two figures.

Shapes: `C` cells, `S` seeds, `N` arms, `K` recorded iterations.
"""

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy import stats

from stages.bandit.simulate import Cell, Landscape, Outcome

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
"""Names of the methods in tables and figures."""

DIVERGENCE_LABELS = {
    "reverse_kl": "reverse KL",
    "hellinger": "Hellinger",
    "forward_kl": "forward KL",
}
"""Names of the divergences in tables and figures."""

GEB = ("one_minus_pi", "inverse_pi", "arctanh")
REWARD_COLOUR = "C1"
LINE_STYLES = {"reverse_kl": "-", "hellinger": "--", "forward_kl": ":"}
SMALLEST_SHOWN = 1e-7
"""Lower end of the axis of probabilities: what a policy has given up lies below it."""
NUM_BINS = 50
"""Bins of arms in the figure of the policies."""


def summarise(every: list[Cell], outcome: Outcome, landscape: Landscape) -> list[dict[str, Any]]:
    """One record per cell: per-seed results and what they come to.

    "Ends in the best region" means that arms better than the local optimum have most of the final
    policy's probability; "found after" is the first recorded iteration from which that stays so.
    """
    records = []
    for index, cell in enumerate(every):
        policy = outcome.policy[index]
        mass = outcome.best_mass[index]
        rewards = outcome.reward[index].tolist()
        last = mass[:, -1].tolist()
        found = [_found_after(outcome.steps, seed.tolist()) for seed in mass]
        likeliest = policy.argmax(dim=-1).tolist()
        done = [steps for steps in found if steps is not None]
        is_best = [arm == landscape.best_arm for arm in likeliest]
        records.append(
            {
                "method": cell.method,
                "divergence": cell.divergence,
                "kappa": cell.kappa if cell.method != "none" else None,
                "share_best_arm_likeliest": statistics.mean(is_best),
                "share_in_best_region": statistics.mean(each > 0.5 for each in last),
                "expected_reward": statistics.mean(rewards),
                "expected_reward_half_width": _half_width(rewards),
                "median_found_after": statistics.median(done) if done else None,
                "likeliest_arm_by_seed": likeliest,
                "expected_reward_by_seed": rewards,
                "best_region_mass_by_seed": last,
                "found_after_by_seed": found,
            }
        )
    return records


def _found_after(steps: list[int], mass: list[float]) -> int | None:
    """First recorded iteration from which the best region keeps more than half of the mass."""
    found = None
    for step, value in zip(reversed(steps), reversed(mass), strict=True):
        if value <= 0.5:
            break
        found = step
    return found


def _half_width(values: list[float]) -> float | None:
    """Half width of the 95 % confidence interval of the mean; None of a single value."""
    if len(values) < 2:
        return None
    quantile = stats.t.ppf(0.975, len(values) - 1)
    return float(quantile) * statistics.stdev(values) / len(values) ** 0.5


def table(records: list[dict[str, Any]]) -> str:
    """The records as a Markdown table."""
    lines = [
        "| divergence | method | κ | best arm likeliest | in best region | expected reward "
        "| found after |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for divergence, label in DIVERGENCE_LABELS.items():
        lines += [_row(label, record) for record in records if record["divergence"] == divergence]
    return "\n".join(lines) + "\n"


def _row(label: str, record: dict[str, Any]) -> str:
    kappa = record["kappa"]
    half_width = record["expected_reward_half_width"]
    reward = f"{record['expected_reward']:.3f}"
    found = record["median_found_after"]
    cells = (
        label,
        LABELS[record["method"]],
        "–" if kappa is None else f"{kappa:g}",
        f"{record['share_best_arm_likeliest']:.0%}",
        f"{record['share_in_best_region']:.0%}",
        reward if half_width is None else f"{reward} ± {half_width:.3f}",
        "–" if found is None else f"{found:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def draw(out: Path, every: list[Cell], outcome: Outcome, landscape: Landscape) -> None:
    """Write reference.png and policies.png into `out`."""
    figures = {
        "reference": reference_figure(landscape),
        "policies": policies_figure(every, outcome, landscape),
    }
    for name, figure in figures.items():
        # Without its version line the file is the same for the same numbers.
        figure.savefig(out / f"{name}.png", dpi=120, metadata={"Software": None})


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


def policies_figure(every: list[Cell], outcome: Outcome, landscape: Landscape) -> Figure:
    """Final policies without and with GEB, first seed, largest κ (the paper's Figure 4)."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    largest = max(cell.kappa for cell in every)
    chosen = {"f-DPO": ("none",), f"GEB, κ = {largest:g}": GEB}
    num_arms = len(landscape.rewards)
    # Single arms are noisy on a logarithmic axis; mass per bin shows where a policy plays.
    width = max(1, num_arms // NUM_BINS)
    centres = [start + width / 2 for start in range(0, num_arms, width)]
    for axes, (title, methods) in zip(panels, chosen.items(), strict=True):
        for cell, policy in zip(every, outcome.policy[:, 0], strict=True):
            if cell.method in methods and cell.kappa in (0.0, largest):
                axes.plot(
                    centres,
                    [float(each.sum()) for each in policy.split(width)],
                    color=f"C{list(LABELS).index(cell.method)}",
                    linestyle=LINE_STYLES[cell.divergence],
                    label=f"{LABELS[cell.method]}, {DIVERGENCE_LABELS[cell.divergence]}",
                )
        axes.axvline(landscape.best_arm, color=REWARD_COLOUR, linewidth=0.8, alpha=0.6)
        axes.set(yscale="log", ylim=(SMALLEST_SHOWN, 2.0), title=title, xlabel="arm")
    panels[0].set_ylabel(f"probability per {width} arms")
    if panels[1].lines:
        figure.legend(loc="outside right center", frameon=False, fontsize=7)
    return figure
