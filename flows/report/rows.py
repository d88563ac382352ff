"""Figures of finished runs as one long table, and over the seeds of a method."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from flows.pipeline.config import RunConfig
from flows.report.statistics import over_seeds
from flows.report.summary import Summary, kappa_label
from flows.report.table import FigureRow, column_of, ordered, shown
from stages.contract.request import ArtifactInput
from stages.evaluate.statistics import Estimate
from stages.store.base import Artifact

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
    # Compared as parts.
    "suites",
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

    def shown(self) -> str:
        """``0.595 ± 0.01``, mean and standard deviation, with the mean's interval."""
        form = column_of(self.figure).form
        # A mean of whole numbers of prompts is a fraction.
        spread = f" ± {stdev(self.values):.2g}" if len(self.values) > 1 else ""
        return shown(self.mean, ".1f" if form == ".0f" else form, spread)


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
        label = ", ".join(filter(None, (train.method, str(train.divergence), kappa_label(train))))
        if label in members:
            label = f"{label} ({run.run})"
        fields = _method_fields(run.config)
        for method, others in members.items():
            # The same settings, and the same files from outside.
            if all(
                _method_fields(other.config) == fields and not read_other_files(other, run)
                for other in others
            ):
                label = method
        members.setdefault(label, []).append(run)
        labels[run.run] = label
    return labels


def _method_fields(config: RunConfig) -> dict[tuple[str, str], Any]:
    """Settings in which repetitions of one method agree, of the run and its suites."""
    fields = {}
    for suite, part in config.parts().items():
        for name, value in part.result_fields().items():
            if name not in _NOT_OF_THE_METHOD:
                fields[suite, name] = value
    return fields


def read_other_files(first: Summary, second: Summary, start: str = "") -> bool:
    """True if a step of both runs read other contents from outside the store.

    With ``start``, only steps whose names begin with it count.
    """
    for step, artifact in first.artifacts.items():
        other = second.artifacts.get(step)
        if step.startswith(start) and other and _from_outside(artifact) != _from_outside(other):
            return True
    return False


def _from_outside(artifact: Artifact) -> list[str]:
    """Digests of files, and revisions of the hub, among an artifact's inputs."""
    sources = artifact.manifest.sources()
    return [source.digest for source in sources if not isinstance(source, ArtifactInput)]


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
