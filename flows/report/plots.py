"""Plots of reports, as SVG text or PNG images."""

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flows.report.table import FigureRow
from stages.evaluate.statistics import Estimate

_PALETTE = (
    "#3b6fb6",
    "#c2571a",
    "#4a8f5c",
    "#7d5ba6",
    "#9a9a9a",
    "#b8860b",
    "#2a9d9d",
    "#c23b78",
)
_DOTS_PER_INCH = 200
_NAME_INCHES = 0.17
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

Bounds = tuple[float, float] | None
_RESULTS: tuple[tuple[str, str, str, Bounds], ...] = (
    ("mean_reward", "Mean reward, held-out prompts", "reward", None),
    ("win_rate", "Win rate over the base, ties lost", "share of prompts", (0.0, 1.0)),
    ("kl_to_base", "KL to the base, held-out prompts", "nats", None),
)
"""Figures by iteration: name, title, label of the values, and ends of their axis."""


def course_figure(
    title: str,
    lines: Mapping[str, Mapping[float, Estimate]],
    xlabel: str,
    ylabel: str,
    *,
    bounds: Bounds = None,
) -> Figure:
    """One line per entry of ``lines``, which has the values by their places on the x axis.

    Intervals are bars. ``bounds`` are the ends of the y axis, by the values if None.
    """
    figure, axes = _new(title, xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for (label, line), colour in zip(lines.items(), cycle(_PALETTE)):
        values = np.array([point.value for point in line.values()])
        ends = np.array([point.interval or (point.value, point.value) for point in line.values()])
        axes.errorbar(
            list(line),
            values,
            yerr=np.clip([values - ends[:, 0], ends[:, 1] - values], 0.0, None),
            color=colour,
            label=label,
            marker="o",
            markersize=4,
        )
    axes.set_ylabel(ylabel)
    if bounds is not None:
        margin = 0.04 * (bounds[1] - bounds[0])
        axes.set_ylim(bounds[0] - margin, bounds[1] + margin)
    if len(lines) > 1:
        _legend(figure, axes)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    """Names the lines below the axes, which many names would cover."""
    number = len(axes.get_legend_handles_labels()[1])
    figure.set_figheight(figure.get_figheight() + _NAME_INCHES * number)
    figure.legend(loc="outside lower left", frameon=False)


def _new(title: str, xlabel: str) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(xlabel)
    return figure, axes


def svg(figure: Figure) -> str:
    """A figure as SVG text."""
    text = _saved(
        figure, format="svg", metadata={"Date": None, "Creator": None}, transparent=True
    ).decode()
    return text[text.index("<svg") :]


def png(figure: Figure) -> bytes:
    """A figure as a PNG image."""
    return _saved(figure, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})


def _saved(figure: Figure, **settings: Any) -> bytes:
    stream = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(stream, **settings)
    return stream.getvalue()


def draw(rows: Mapping[str, Sequence[FigureRow]]) -> dict[str, Figure]:
    """Curves of the figures of one run or several, by title.

    ``rows`` has the rows of each run by its name. A figure of one iteration alone is left out.
    """
    figures: dict[str, Figure] = {}
    for name, title, ylabel, bounds in _RESULTS:
        lines: dict[str, dict[float, Estimate]] = {}
        for run, iterations in rows.items():
            for row in iterations:
                if name in row.figures:
                    lines.setdefault(run, {})[row.iteration] = row.figures[name]
        if any(len(line) > 1 for line in lines.values()):
            figures[title] = course_figure(
                title, lines, "iteration (0 = base)", ylabel, bounds=bounds
            )
    return figures
