"""Figures of finished runs as one long table, and over the seeds of a method."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Any

from flows.pipeline.config import RunConfig
from flows.report.statistics import over_seeds
from flows.report.summary import Summary, kappa_label
from flows.report.table import Cell, FigureRow, column_of, ordered
from stages.evaluate.statistics import Estimate

HELD_OUT = "held-out prompts"
"""Name of the evaluation that every run has, in addition to its suites."""
# Settings in which repetitions of one method may differ.
_NOT_OF_THE_METHOD = {
    "name",
    "seed",
    "model",
    "store",
    "resources",
    "execution",
    "estimation",
    "tracking",
    # A sweep's runs move no alias: what is promoted changes nothing that is learnt.
    "promote",
}


@dataclass(frozen=True)
class MethodFigure:
    """One figure of a method over its seeds.

    Attributes:
        evaluation: ``held-out prompts``, or the name of a suite.
        figure: Name of the figure, as in ``figures.parquet``.
        values: The figure with each of its seeds.
        mean: Their mean with Student's interval.
    """

    evaluation: str
    method: str
    figure: str
    values: Sequence[float]
    mean: Estimate

    def shown(self) -> Cell:
        """``0.595 ± 0.01``, mean and standard deviation, with the mean's interval."""
        form = column_of(self.figure).form
        # A mean of whole numbers of prompts is a fraction.
        cell = Cell.of(self.mean, ".1f" if form == ".0f" else form)
        if len(self.values) < 2:
            return cell
        return replace(cell, text=f"{cell.text} ± {stdev(self.values):.2g}")


def evaluations(run: Summary) -> dict[str, FigureRow]:
    """Figures of a run after its last iteration, by evaluation, suites last."""
    last = {HELD_OUT: run.rows[run.last_iteration]}
    for suite, rows in run.suites.items():
        # A suite may have failed after an iteration that the held-out prompts have.
        if rows[-1].iteration == run.last_iteration:
            last[suite] = rows[-1]
    return last


def method_labels(runs: Sequence[Summary]) -> dict[str, str]:
    """The method of each run by the run's name; repetitions have the same label."""
    labels: dict[str, str] = {}
    members: dict[str, list[Summary]] = {}
    for run in runs:
        train = run.config.train
        parts = (train.method, str(train.divergence), kappa_label(train))
        label = ", ".join(filter(None, parts))
        if label in members:
            label = f"{label} ({run.run})"
        for method, others in members.items():
            if all(_repeats(other, run) for other in others):
                label = method
        members.setdefault(label, []).append(run)
        labels[run.run] = label
    return labels


def _repeats(first: Summary, run: Summary) -> bool:
    """True for two runs of one method: the same settings, and the same files from outside."""
    return _method(first.config) == _method(run.config) and not read_other_files(first, run)


def _method(config: RunConfig) -> dict[str, Any]:
    """Everything in a configuration that its repetitions share."""
    values = config.to_values()
    return {name: values[name] for name in values.keys() - _NOT_OF_THE_METHOD}


def read_other_files(first: Summary, second: Summary, part: str = "") -> bool:
    """True if a step of both runs read other contents from outside the store.

    With ``part``, only steps whose names contain it count.
    """
    steps = first.outside.keys() & second.outside.keys()
    return any(part in step and first.outside[step] != second.outside[step] for step in steps)


Groups = dict[tuple[str, str], dict[str, dict[int, float]]]
"""Values by evaluation and figure, there by method, and there by seed."""


def by_figure(runs: Sequence[Summary], methods: Mapping[str, str]) -> Groups:
    """Groups the figures of runs, whose methods are given by the runs' names.

    A run that ended before the others is left out. Runs of one method and seed are one observation:
    the first counts.
    """
    groups: Groups = {}
    furthest = max(run.last_iteration for run in runs)
    for run in runs:
        if run.last_iteration < min(run.config.iterations, furthest):
            continue
        for evaluation, row in evaluations(run).items():
            for figure in ordered(row.figures):
                group = groups.setdefault((evaluation, figure), {})
                values = group.setdefault(methods[run.run], {})
                values.setdefault(run.config.seed, row.values[figure])
    return groups


def method_figures(groups: Groups) -> Iterator[MethodFigure]:
    """Every figure of every method over its seeds."""
    for (evaluation, figure), methods in groups.items():
        for method, seeds in methods.items():
            values = list(seeds.values())
            mean = over_seeds(values, column_of(figure).bounds)
            yield MethodFigure(evaluation, method, figure, values, mean)
