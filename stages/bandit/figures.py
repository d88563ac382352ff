"""The two figures of the paper's toy experiment, and the curves behind them, as PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from stages.bandit.cells import Cell
from stages.bandit.landscape import Landscape
from stages.bandit.simulate import Outcome
from stages.bandit.summary import DIVERGENCE_LABELS, LABELS

GEB = ("one_minus_pi", "inverse_pi", "arctanh")
COLOURS = {
    "none": "#9a9a9a",
    "feb": "#5b5b5b",
    "selm": "#c9a227",
    "xpo": "#a9746e",
    "vpo": "#c97b9b",
    "se_popo": "#7d5ba6",
    "one_minus_pi": "#3b6fb6",
    "inverse_pi": "#c2571a",
    "arctanh": "#4a8f5c",
}
REWARD_COLOUR = "#c2571a"
LINE_STYLES = {"reverse_kl": "-", "hellinger": "--", "forward_kl": ":"}
SMALLEST_SHOWN = 1e-7
"""Lower end of the axis of probabilities: what a policy has given up lies below it."""
NUM_BINS = 50
"""Bins of arms in the figure of the policies."""
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


def draw(out: Path, every: list[Cell], outcome: Outcome, landscape: Landscape) -> None:
    """Write reference.png, policies.png and curves.png into `out`."""
    with mpl.rc_context(_STYLE):
        _save(reference_figure(landscape), out / "reference.png")
        _save(policies_figure(every, outcome, landscape), out / "policies.png")
        _save(curves_figure(every, outcome), out / "curves.png")


def reference_figure(landscape: Landscape) -> Figure:
    """The reference's distribution and the rewards (the paper's Figure 5)."""
    figure = Figure(figsize=(4.6, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(landscape.reference, color="#3b6fb6", label="reference")
    axes.set_yscale("log")
    axes.set_xlabel("arm")
    axes.set_ylabel("probability")
    rewards = axes.twinx()
    rewards.plot(landscape.rewards, color=REWARD_COLOUR, label="reward")
    rewards.set_ylabel("reward")
    rewards.grid(visible=False)
    rewards.spines["right"].set_visible(True)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def policies_figure(every: list[Cell], outcome: Outcome, landscape: Landscape) -> Figure:
    """Final policies without and with GEB, first seed, largest κ (the paper's Figure 4)."""
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    largest = max(cell.kappa for cell in every)
    chosen = {
        "f-DPO": [i for i, cell in enumerate(every) if cell.method == "none"],
        f"GEB, κ = {largest:g}": [
            i for i, cell in enumerate(every) if cell.method in GEB and cell.kappa == largest
        ],
    }
    num_arms = len(landscape.rewards)
    # Single arms are noisy on a logarithmic axis; mass per bin shows where a policy plays.
    width = max(1, num_arms // NUM_BINS)
    for axes, (title, indices) in zip(panels, chosen.items(), strict=True):
        for index in indices:
            cell = every[index]
            bins = outcome.policy[index, 0].split(width)
            axes.plot(
                [start + width / 2 for start in range(0, num_arms, width)],
                [float(each.sum()) for each in bins],
                color=COLOURS[cell.method],
                linestyle=LINE_STYLES[cell.divergence],
                linewidth=1.2,
                label=f"{LABELS[cell.method]}, {DIVERGENCE_LABELS[cell.divergence]}",
            )
        axes.axvline(landscape.best_arm, color=REWARD_COLOUR, linewidth=0.8, alpha=0.6)
        axes.set_yscale("log")
        axes.set_ylim(SMALLEST_SHOWN, 2.0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("arm")
    panels[0].set_ylabel(f"probability per {width} arms")
    if panels[1].lines:
        figure.legend(loc="outside right center", frameon=False, fontsize=7)
    return figure


def curves_figure(every: list[Cell], outcome: Outcome) -> Figure:
    """Mean expected reward over iterations, one panel per divergence and κ."""
    divergences = list(dict.fromkeys(cell.divergence for cell in every))
    kappas = sorted({cell.kappa for cell in every if cell.method != "none"}) or [0.0]
    figure = Figure(figsize=(3.4 * len(kappas), 2.5 * len(divergences)), layout="constrained")
    panels = figure.subplots(len(divergences), len(kappas), sharex=True, sharey=True, squeeze=False)
    for row, divergence in zip(panels, divergences, strict=True):
        for axes, kappa in zip(row, kappas, strict=True):
            axes.set_title(
                f"{DIVERGENCE_LABELS[divergence]}, κ = {kappa:g}", loc="left", fontsize=9
            )
            for index, cell in enumerate(every):
                if cell.divergence == divergence and cell.kappa in (kappa, 0.0):
                    axes.plot(
                        outcome.steps,
                        outcome.reward[index].mean(dim=0),
                        color=COLOURS[cell.method],
                        linewidth=1.2,
                        label=LABELS[cell.method],
                    )
    for axes in panels[-1]:
        axes.set_xlabel("iteration")
    for row in panels:
        row[0].set_ylabel("expected reward")
    handles: dict[str, Artist] = {}
    for axes in panels.flat:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=5, frameon=False, fontsize=8
    )
    return figure


def _save(figure: Figure, path: Path) -> None:
    # Without its version line the file is the same for the same numbers.
    figure.savefig(path, dpi=120, metadata={"Software": None})
