"""Plots of the report, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

POLICY, BASE, ACCENT = "#3b6fb6", "#9a9a9a", "#c2571a"
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "svg.hashsalt": "geb",
}


def line_plot(
    title: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], xlabel: str
) -> str:
    """One line per entry of ``series``, each its x and y values."""
    figure, axes = _new(title, xlabel, integer_x=True)
    colours = (POLICY, ACCENT, "#4a8f5c", "#7d5ba6", BASE)
    for (label, (x, y)), colour in zip(series.items(), colours, strict=False):
        marker = "o" if len(x) <= 12 else None
        axes.plot(x, y, color=colour, label=label, marker=marker, markersize=4, linewidth=1.6)
    if len(series) > 1:
        axes.legend(frameon=False)
    return _svg(figure)


def histogram(title: str, samples: Mapping[str, Sequence[float]], xlabel: str) -> str:
    """Distributions of several samples over common bins, as densities."""
    figure, axes = _new(title, xlabel)
    colours = {"policy": POLICY, "base": BASE}
    values = [value for group in samples.values() for value in group]
    low, high = min(values), max(values)
    width = (high - low) / 40 or 1.0
    bins = [low + i * width for i in range(42)]
    for label, group in samples.items():
        weights = [1 / len(group)] * len(group)
        axes.hist(
            group,
            bins=bins,
            weights=weights,
            color=colours.get(label, ACCENT),
            alpha=0.55,
            label=label,
        )
    axes.set_ylabel("share of samples")
    axes.legend(frameon=False)
    return _svg(figure)


def _new(title: str, xlabel: str, *, integer_x: bool = False) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
    if integer_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(xlabel)
    return figure, axes


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
