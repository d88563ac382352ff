"""Plots of reports, as SVG text or PNG images, and the figures that a run has."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flows.report.rows import MethodRow
from flows.report.summary import Summary
from flows.report.table import figure_of
from stages.contract.data_files import read_data_file
from stages.store.base import Artifact

POLICY = "#3b6fb6"
BASE = "#9a9a9a"
ACCENT = "#c2571a"
PALETTE = (POLICY, ACCENT, "#4a8f5c", "#7d5ba6", BASE, "#b8860b", "#2a9d9d", "#c23b78")
_OF_MODELS = {"policy": POLICY, "base": BASE}
_DOTS_PER_INCH = 200
_MARK = "#8a94a0"
# Longer lines are smoothed.
_RAW_POINTS = 40
# A histogram gains nothing from more samples of one kind.
_MAX_PLOTTED = 20_000
_MOST_NAMES_INSIDE = 3
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
RESULTS: tuple[tuple[str, str, str, Bounds], ...] = (
    ("mean_reward", "Mean reward, held-out prompts", "reward", None),
    ("win_rate", "Win rate over the base, ties lost", "share of prompts", (0.0, 1.0)),
)
"""Figures by iteration: name, title, label of the values, and ends of their axis."""
RESULTS_AXIS = "iteration (0 = base)"
_OF_STEPS: Mapping[str, Sequence[tuple[str, str, str, Bounds]]] = {
    "Learning": (
        ("loss", "Training loss", "loss", None),
        ("bonus_ratio", "|κ·bonus| / |L|", "ratio", None),
        ("accuracy", "Preference accuracy", "share of pairs", (0.0, 1.0)),
    ),
    "Speed": (
        ("tokens_per_second", "Training, tokens per second", "tokens/s", None),
        ("model_flops_utilisation", "Training, share of the matrix-product rate", "share", None),
        ("peak_memory_mib", "Training, peak memory in MiB", "MiB", None),
    ),
}


@dataclass(frozen=True)
class Line:
    """A line of a plot, with the ends of an interval around each value that has one."""

    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[tuple[float, float] | None] = ()


def results_line(rows: Sequence[Mapping[str, Any]], figure: str) -> Line:
    """A figure by iteration, from rows as :attr:`flows.report.summary.Summary.rows` has them."""
    found = [(row["iteration"], figure_of(row, figure)) for row in rows]
    known = {iteration: each for iteration, each in found if each is not None}
    values = known.values()
    return Line([*known], [each.value for each in values], [each.interval for each in values])


def course_figure(
    title: str,
    lines: Mapping[str, Line],
    xlabel: str,
    ylabel: str,
    *,
    marks: Sequence[float] = (),
    bounds: Bounds = None,
) -> Figure:
    """One line per entry of ``lines``; a long one is smoothed, with its own points behind it.

    Intervals are bars at a single line, and bands around several. ``marks`` are places of vertical
    lines, where an iteration begins; ``bounds`` the ends of the y axis, by the values if None.
    """
    figure, axes = _new(title, xlabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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
        _legend(figure, axes)
    return figure


def _line(axes: Axes, label: str, line: Line, colour: str) -> None:
    if len(line.x) > _RAW_POINTS:
        axes.plot(line.x, line.y, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(line.x, _smoothed(line.y), color=colour, label=label, linewidth=1.6)
        return
    marker = "o" if len(line.x) <= 12 else None
    axes.plot(line.x, line.y, color=colour, label=label, marker=marker, markersize=4, linewidth=1.6)


def _intervals(axes: Axes, line: Line, colour: str, *, as_bars: bool) -> None:
    places = zip(line.x, line.y, line.intervals, strict=True) if line.intervals else ()
    known = np.array([(x, y, *ends) for x, y, ends in places if ends is not None], dtype=float)
    if not len(known):
        return
    x, y, low, high = known.T
    if not as_bars:
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        return
    ends = np.clip([y - low, high - y], 0.0, None)
    axes.errorbar(x, y, yerr=ends, fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)


def _smoothed(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Mean over a window around each value, a fifteenth of the line wide, narrower at its ends.

    A value that is not finite leaves a gap: the windows that it is in have no mean.
    """
    half = max(1, len(values) // 30)
    numbers = np.asarray(values, dtype=np.float64)
    finite = np.where(np.isfinite(numbers), numbers, np.nan)
    return np.array([finite[max(0, i - half) : i + half + 1].mean() for i in range(len(finite))])


def histogram_figure(title: str, samples: Mapping[str, Sequence[float]], xlabel: str) -> Figure:
    """Distributions of several samples over common bins, as shares; large samples are thinned."""
    figure, axes = _new(title, xlabel)
    thinned = {label: group[:: len(group) // _MAX_PLOTTED + 1] for label, group in samples.items()}
    values = np.concatenate([*thinned.values()])
    width = (values.max() - values.min()) / 40
    bins = values.min() + (width or 1.0) * np.arange(42)
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
    _legend(figure, axes)
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    """Names what is drawn; many names stand below the axes, which they would cover."""
    number = len(axes.get_legend_handles_labels()[1])
    if number <= _MOST_NAMES_INSIDE:
        axes.legend(loc="best", frameon=False)
        return
    figure.set_figheight(figure.get_figheight() + _NAME_INCHES * number)
    figure.legend(loc="outside lower left", frameon=False)


def spread_figure(title: str, panels: Mapping[str, Sequence[MethodRow]]) -> Figure:
    """Means over seeds with their intervals, and behind them the runs, side by side.

    ``panels`` has methods over their seeds by the label of their figure.
    """
    labels = list(dict.fromkeys(row.method for rows in panels.values() for row in rows))
    with mpl.rc_context(_STYLE):
        size = (1.6 + 3.0 * len(panels), 1.1 + 0.4 * len(labels))
        figure = Figure(figsize=size, layout="constrained")
        drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (xlabel, rows) in zip(drawn, panels.items(), strict=True):
        for row in rows:
            place = labels.index(row.method)
            mean = row.mean.value
            low, high = row.mean.interval or (mean, mean)
            places = [place] * len(row.values)
            axes.scatter(row.values, places, s=14, color=BASE, alpha=0.7, zorder=2)
            axes.errorbar(
                [mean],
                [place],
                xerr=[[mean - low], [high - mean]],
                fmt="o",
                color=POLICY,
                markersize=5,
                capsize=3,
                zorder=3,
            )
        axes.set_xlabel(xlabel)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _new(title: str, xlabel: str) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(xlabel)
    return figure, axes


def svg(figure: Figure) -> str:
    """A figure as SVG text."""
    text = _saved(figure, format="svg", metadata={"Date": None}, transparent=True).decode()
    return text[text.index("<svg") :]


def png(figure: Figure) -> bytes:
    """A figure as a PNG image."""
    return _saved(figure, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})


def _saved(figure: Figure, **settings: Any) -> bytes:
    stream = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(stream, **settings)
    return stream.getvalue()


@dataclass(frozen=True)
class Plot:
    """One figure of a run, in a group of the report."""

    title: str
    group: str
    svg: str


def draw(summary: Summary) -> list[Plot]:
    """The figures that a run has, results first."""
    last = summary.last("evaluate")
    groups: dict[str, Iterator[tuple[str, Figure]]] = {
        "Results by iteration": _results(summary),
        "Learning": _training(summary, "Learning"),
        "Samples of the last iteration, in numbers": _distributions(last) if last else iter(()),
        "Speed": _training(summary, "Speed"),
    }
    return [
        Plot(title, group, svg(figure))
        for group, drawn in groups.items()
        for title, figure in drawn
    ]


def _results(summary: Summary) -> Iterator[tuple[str, Figure]]:
    """Figures on the held-out prompts by iteration, with their 95 % intervals."""
    components = [
        (f"components.{name}", f"Oracle component {name}", name, None)
        for name in summary.components()
    ]
    for name, title, ylabel, bounds in (*RESULTS, *components):
        line = results_line(summary.rows, name)
        if len(line.x) > 1:
            lines = {name: line}
            yield title, course_figure(title, lines, RESULTS_AXIS, ylabel, bounds=bounds)
    opinions = summary.second_opinions()
    lines = {
        each.name: results_line(each.rows, "mean_reward")
        for each in summary.suites
        if each.name in opinions
    }
    if lines:
        title = "The reward trained for, and second opinions"
        lines = {"trained for": results_line(summary.rows, "mean_reward"), **lines}
        yield title, course_figure(title, lines, RESULTS_AXIS, "mean reward")


def _training(summary: Summary, group: str) -> Iterator[tuple[str, Figure]]:
    """Metrics of all training steps, one iteration after the other."""
    steps: list[dict[str, Any]] = []
    marks: list[float] = []
    for _, artifact in summary.made("train"):
        marks.append(len(steps) + 0.5)
        steps += [metrics for _, metrics in read_data_file(artifact.file("metrics.jsonl"))]
    for name, title, ylabel, bounds in _OF_STEPS[group]:
        known = {step: each[name] for step, each in enumerate(steps, 1) if name in each}
        if len(known) > 1:
            figure = course_figure(
                title,
                {name: Line([*known], [*known.values()])},
                "step, all iterations",
                ylabel,
                marks=marks[1:],
                bounds=bounds,
            )
            yield title, figure


def _distributions(artifact: Artifact) -> Iterator[tuple[str, Figure]]:
    table = pq.read_table(artifact.file("distributions.parquet"))
    for column, title, label in (
        ("reward", "Rewards of the samples, last iteration", "reward"),
        ("log_pi_ref", "log π_ref of the samples, last iteration", "log π_ref"),
    ):
        known = table.filter(pc.is_valid(table[column]))
        samples = {
            model: known.filter(pc.equal(known["model"], model))[column].to_pylist()
            for model in known["model"].unique().to_pylist()
        }
        if samples:
            yield title, histogram_figure(title, samples, label)
