"""Plots of reports, as SVG text or PNG images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

POLICY, BASE, ACCENT = "#3b6fb6", "#9a9a9a", "#c2571a"
PALETTE = (POLICY, ACCENT, "#4a8f5c", "#7d5ba6", BASE, "#b8860b", "#2a9d9d", "#c23b78")
_OF_MODELS = {"policy": POLICY, "base": BASE}
_DOTS_PER_INCH = 200
# A line at 1 must not lie on the frame.
_ABOVE_ONE = 1.03
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "svg.hashsalt": "geb",
}


Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
Bands = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def line_plot(title: str, series: Series, xlabel: str) -> str:
    """One line per entry of ``series``, each its x and y values, as SVG."""
    return svg(line_figure(title, series, xlabel))


def line_figure(
    title: str, series: Series, xlabel: str, bands: Bands | None = None, *, share: bool = False
) -> Figure:
    """One line per entry of ``series``, with intervals around them.

    Args:
        title: Title of the figure.
        series: x and y values of each line by its label.
        xlabel: Label of the x axis.
        bands: Lower and upper ends at a line's points, by the same labels.
        share: Whether the values are shares, which are shown from 0 to 1.
    """
    figure, axes = _new(title, xlabel, integer_x=True)
    for (label, (x, y)), colour in zip(series.items(), cycle(PALETTE)):
        marker = "o" if len(x) <= 12 else None
        axes.plot(x, y, color=colour, label=label, marker=marker, markersize=4, linewidth=1.6)
        if bands and label in bands:
            axes.fill_between(x, *bands[label], color=colour, alpha=0.15, linewidth=0)
    if share:
        axes.set_ylim(0, _ABOVE_ONE)
    if len(series) > 1:
        axes.legend(frameon=False)
    return figure


def histogram(title: str, samples: Mapping[str, Sequence[float]], xlabel: str) -> str:
    """Distributions of several samples over common bins, as shares, as SVG."""
    return svg(histogram_figure(title, samples, xlabel))


def histogram_figure(title: str, samples: Mapping[str, Sequence[float]], xlabel: str) -> Figure:
    """Distributions of several samples over common bins, as shares."""
    figure, axes = _new(title, xlabel)
    values = [value for group in samples.values() for value in group]
    low, high = min(values), max(values)
    width = (high - low) / 40 or 1.0
    bins = [low + i * width for i in range(42)]
    for (label, group), colour in zip(samples.items(), cycle(PALETTE)):
        axes.hist(
            group,
            bins=bins,
            weights=[1 / len(group)] * len(group),
            color=_OF_MODELS.get(label, colour),
            alpha=0.55,
            label=label,
        )
    axes.set_ylabel("share of samples")
    axes.legend(frameon=False)
    return figure


def _new(title: str, xlabel: str, *, integer_x: bool = False) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
    if integer_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(xlabel)
    return figure, axes


def svg(figure: Figure) -> str:
    """A figure as SVG text."""
    stream = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def png(figure: Figure) -> bytes:
    """A figure as a PNG image."""
    stream = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(stream, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()
