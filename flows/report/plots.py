"""Plots of reports, as SVG text or PNG images."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flows.report.table import FigureRow
from stages.evaluate.statistics import Estimate

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

_RESULTS = (
    ("mean_reward", "Mean reward, held-out prompts", "reward"),
    ("win_rate", "Win rate over the base, ties lost", "share of prompts"),
    ("kl_to_base", "KL to the base, held-out prompts", "nats"),
)
"""Figures by iteration: name, title, and label of the values."""


def _course_figure(title: str, lines: Mapping[str, Mapping[int, Estimate]], ylabel: str) -> Figure:
    """One line per entry of ``lines``, which has the values by iteration; intervals are bars."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("iteration (0 = base)")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for label, line in lines.items():
        values = []
        below = []
        above = []
        for point in line.values():
            low, high = point.interval or (point.value, point.value)
            values.append(point.value)
            below.append(max(0.0, point.value - low))
            above.append(max(0.0, high - point.value))
        axes.errorbar(
            list(line),
            values,
            yerr=[below, above],
            label=label,
            marker="o",
            markersize=4,
        )
    if len(lines) > 1:
        # Below the axes, which many names would cover.
        figure.set_figheight(figure.get_figheight() + _NAME_INCHES * len(lines))
        figure.legend(loc="outside lower left", frameon=False)
    return figure


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
    figures = {}
    for name, title, ylabel in _RESULTS:
        lines: dict[str, dict[int, Estimate]] = {}
        for run, iterations in rows.items():
            for row in iterations:
                if name in row.figures:
                    lines.setdefault(run, {})[row.iteration] = row.figures[name]
        if any(len(line) > 1 for line in lines.values()):
            figures[title] = _course_figure(title, lines, ylabel)
    return figures
