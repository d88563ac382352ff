"""Plots of reports, as SVG text or PNG images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

POLICY, BASE, ACCENT = "#3b6fb6", "#9a9a9a", "#c2571a"
PALETTE = (POLICY, ACCENT, "#4a8f5c", "#7d5ba6", BASE, "#b8860b", "#2a9d9d", "#c23b78")
_OF_MODELS = {"policy": POLICY, "base": BASE}
_DOTS_PER_INCH = 200
_MARK = "#8a94a0"
# Longer lines are smoothed.
_RAW_POINTS = 40
# A histogram gains nothing from more samples of one kind.
_MAX_PLOTTED = 20_000
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    # Names of an oracle's components may hold dollar signs.
    "text.parse_math": False,
    "svg.hashsalt": "geb",
}


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        x: Places, in order.
        y: Values.
        intervals: Lower and upper end around each value; None where one has none.
    """

    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[tuple[float, float] | None] = ()


def course_figure(
    title: str,
    lines: Mapping[str, Line],
    xlabel: str,
    ylabel: str,
    *,
    marks: Sequence[float] = (),
    bounds: tuple[float, float] | None = None,
) -> Figure:
    """One line per entry of ``lines``; a long one is smoothed, with its own points behind it.

    Intervals are bars at a single line, and bands around several.

    Args:
        title: Title of the figure.
        lines: Lines by their labels.
        xlabel: What x is.
        ylabel: What y is, with its unit.
        marks: Places of vertical lines, where an iteration begins.
        bounds: Ends of the y axis; those of the values if None.
    """
    figure, axes = _new(title, xlabel, integer_x=True)
    for (label, line), colour in zip(lines.items(), cycle(PALETTE)):
        _line(axes, label, line, colour)
        _intervals(axes, line, colour, as_bars=len(lines) == 1)
    for mark in marks:
        axes.axvline(mark, color=_MARK, linewidth=0.8, linestyle=":")
    axes.set_ylabel(ylabel)
    if bounds is not None:
        margin = 0.04 * (bounds[1] - bounds[0])
        axes.set_ylim(bounds[0] - margin, bounds[1] + margin)
    if len(lines) > 1:
        axes.legend(frameon=False)
    return figure


def _line(axes: Axes, label: str, line: Line, colour: str) -> None:
    if len(line.x) > _RAW_POINTS:
        axes.plot(line.x, line.y, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(line.x, _smoothed(line.y), color=colour, label=label, linewidth=1.6)
        return
    marker = "o" if len(line.x) <= 12 else None
    axes.plot(line.x, line.y, color=colour, label=label, marker=marker, markersize=4, linewidth=1.6)


def _intervals(axes: Axes, line: Line, colour: str, *, as_bars: bool) -> None:
    known = [
        (x, y, *interval)
        for x, y, interval in zip(
            line.x, line.y, line.intervals or [None] * len(line.x), strict=True
        )
        if interval is not None
    ]
    if not known:
        return
    x, y, low, high = zip(*known, strict=True)
    if not as_bars:
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        return
    below = [max(0.0, value - end) for value, end in zip(y, low, strict=True)]
    above = [max(0.0, end - value) for value, end in zip(y, high, strict=True)]
    axes.errorbar(x, y, yerr=[below, above], fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)


def _smoothed(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Mean over a window around each value, a fifteenth of the line wide, narrower at its ends.

    A value that is no finite number leaves a gap: the windows that it is in have no mean.
    """
    half = max(1, len(values) // 30)
    numbers = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(numbers)
    # Of sums up to each place, so that the time does not grow with the window as well.
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, numbers, 0.0))])
    gaps = np.concatenate([[0], np.cumsum(~finite)])
    places = np.arange(len(numbers))
    start, stop = np.maximum(places - half, 0), np.minimum(places + half + 1, len(numbers))
    means = (sums[stop] - sums[start]) / (stop - start)
    return np.where(gaps[stop] > gaps[start], np.nan, means)


def histogram_figure(title: str, samples: Mapping[str, Sequence[float]], xlabel: str) -> Figure:
    """Distributions of several samples over common bins, as shares; large samples are thinned."""
    figure, axes = _new(title, xlabel)
    thinned = {label: group[:: len(group) // _MAX_PLOTTED + 1] for label, group in samples.items()}
    values = [value for group in thinned.values() for value in group]
    low, high = min(values), max(values)
    width = (high - low) / 40 or 1.0
    bins = [low + i * width for i in range(42)]
    for (label, group), colour in zip(thinned.items(), cycle(PALETTE)):
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


@dataclass(frozen=True)
class Spread:
    """Repetitions of one measurement.

    Attributes:
        values: One for each seed.
        interval: Interval of their mean; None of a single one.
    """

    values: Sequence[float]
    interval: tuple[float, float] | None


def spread_figure(title: str, panels: Mapping[str, Mapping[str, Spread]]) -> Figure:
    """Means with their intervals, and behind them the repetitions, side by side.

    Args:
        title: Title of the figure.
        panels: For each figure, by its label with unit, the spreads by the labels of their rows.
    """
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    with mpl.rc_context(_STYLE):
        size = (1.6 + 3.0 * len(panels), 1.1 + 0.4 * len(labels))
        figure = Figure(figsize=size, layout="constrained")
        for axes, (xlabel, spreads) in zip(
            figure.subplots(1, len(panels), sharey=True, squeeze=False)[0],
            panels.items(),
            strict=True,
        ):
            for row, label in enumerate(labels):
                if label in spreads:
                    _spread(axes, row, spreads[label])
            axes.set_xlabel(xlabel)
            axes.set_yticks(range(len(labels)), labels)
            axes.set_ylim(len(labels) - 0.5, -0.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _spread(axes: Axes, row: int, found: Spread) -> None:
    mean = sum(found.values) / len(found.values)
    axes.scatter(found.values, [row] * len(found.values), s=14, color=BASE, alpha=0.7, zorder=2)
    low, high = found.interval or (mean, mean)
    axes.errorbar(
        *([mean], [row]),
        xerr=[[mean - low], [high - mean]],
        fmt="o",
        color=POLICY,
        markersize=5,
        capsize=3,
        zorder=3,
    )


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
        figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
    text = stream.getvalue()
    return text[text.index("<svg") :]


def png(figure: Figure) -> bytes:
    """A figure as a PNG image."""
    stream = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(stream, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return stream.getvalue()
