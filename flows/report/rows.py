"""Figures of finished runs as one long table; over seeds; differences of runs by prompt."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from flows.pipeline.config import RunConfig
from flows.pipeline.steps import suite_place
from flows.report.statistics import difference_of_methods, holm, over_seeds, paired_difference
from flows.report.summary import Summary, kappa_label, last_iteration
from flows.report.table import (
    BASE,
    POLICY,
    Cell,
    Model,
    column_of,
    figure_names,
    figure_of,
    interval_text,
)
from stages.evaluate.statistics import Estimate
from stages.store.base import Artifact

HELD_OUT = "held-out prompts"
"""Name of the evaluation that every run has, in addition to its suites."""
# Settings in which repetitions of one method may differ.
_NOT_OF_THE_METHOD = (
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
)
_SIGNIFICANT = 0.05
PromptMeans = dict[str, dict[str, float]]
"""Means of each prompt's samples, by figure and prompt."""


@dataclass(frozen=True)
class Row:
    """One figure of one run after its last iteration.

    Attributes:
        evaluation: ``held-out prompts``, or the name of a suite.
        method: Label of its method, or of its combination in a grid.
        figure: Name of the figure in ``metrics.json``.
        low: Lower end of the 95 % interval over prompts; None if there is none.
    """

    evaluation: str
    run: str
    method: str
    seed: int
    iteration: int
    figure: str
    value: float
    low: float | None
    high: float | None

    def shown(self, form: str) -> Cell:
        """The figure with its interval, for a person."""
        return Cell.of(Estimate(self.value, self.low, self.high), form)


@dataclass(frozen=True)
class MethodRow:
    """One figure of a method over its seeds, tested against the first method by a t test.

    Attributes:
        evaluation: As in :class:`Row`.
        values: The figure in each of its runs.
        mean: Their mean with Student's interval.
        difference: Mean minus the first method's; None for the first.
        test: ``paired`` or ``Welch``, see :func:`difference_of_methods`; empty for the first.
        adjusted_p_value: The difference's p-value after Holm's correction over the methods; None
            without a test.
    """

    evaluation: str
    method: str
    figure: str
    values: Sequence[float]
    mean: Estimate
    difference: Estimate | None = None
    test: str = ""
    adjusted_p_value: float | None = None

    def shown(self, form: str) -> Cell:
        """``0.595 ± 0.01``, mean and standard deviation, with the mean's interval."""
        # A mean of whole numbers of prompts is a fraction.
        is_count = form == ".0f"
        mean = format(self.mean.value, ".1f" if is_count else form)
        if len(self.values) < 2:
            return Cell(mean)
        interval = interval_text(self.mean.interval, ".1f" if is_count else ".3g")
        return Cell(f"{mean} ± {stdev(self.values):.2g}", interval)


def run_rows(run: Summary, method: str) -> Iterator[Row]:
    """Figures of a run's evaluations after its last iteration, suites last."""
    yield from _rows(run, method, run.rows[last_iteration(run) or -1], HELD_OUT)
    for suite, rows in run.suites.items():
        yield from _rows(run, method, rows[-1], suite)


def _rows(run: Summary, method: str, row: Mapping[str, Any], evaluation: str) -> Iterator[Row]:
    """The figures of one iteration that are known."""
    for name in figure_names([row]):
        estimate = figure_of(row, name)
        if estimate is not None:
            yield Row(
                evaluation=evaluation,
                run=run.run,
                method=method,
                seed=run.config.seed,
                iteration=row["iteration"],
                figure=name,
                value=estimate.value,
                low=estimate.low,
                high=estimate.high,
            )


def method_labels(runs: Sequence[Summary]) -> dict[str, str]:
    """The method of each run by the run's name; repetitions have the same label."""
    labels: dict[str, str] = {}
    label_by_method: dict[str, str] = {}
    for run in runs:
        method = method_of(run.config)
        if method not in label_by_method:
            train = run.config.train
            parts = (train.method, str(train.divergence), kappa_label(train))
            label = ", ".join(filter(None, parts))
            if label in label_by_method.values():
                label = f"{label} ({run.run})"
            label_by_method[method] = label
        labels[run.run] = label_by_method[method]
    return labels


def method_of(config: RunConfig) -> str:
    """Everything in a configuration that its repetitions share."""
    values = config.to_values()
    for name in _NOT_OF_THE_METHOD:
        values.pop(name, None)
    return json.dumps(values, sort_keys=True)


def method_rows(rows: Sequence[Row], methods: Sequence[str]) -> list[MethodRow]:
    """Every figure of every method over its seeds, tested against the first of ``methods``."""
    groups: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        group = groups.setdefault((row.evaluation, row.figure), {})
        group.setdefault(row.method, []).append((row.seed, row.value))
    method_figures: list[MethodRow] = []
    for (evaluation, figure), group in groups.items():
        method_figures += _methods(evaluation, figure, group, methods[0])
    return method_figures


def _methods(
    evaluation: str, figure: str, group: Mapping[str, list[tuple[int, float]]], first: str
) -> Iterator[MethodRow]:
    whole = 1.0 if column_of(figure).share else None
    # The first method may lack a suite that others have.
    first_runs = group.get(first)
    tests: dict[str, tuple[Estimate, str]] = {}
    if first_runs:
        for method, runs in group.items():
            if method != first:
                tests[method] = difference_of_methods(first_runs, runs, whole)
    p_values = holm([difference.p_value for difference, _ in tests.values()])
    adjusted_by_method = dict(zip(tests, p_values, strict=True))
    for method, runs in group.items():
        values = [value for _, value in runs]
        difference, test = tests.get(method, (None, ""))
        yield MethodRow(
            evaluation=evaluation,
            method=method,
            figure=figure,
            values=values,
            mean=over_seeds(values, whole),
            difference=difference,
            test=test,
            adjusted_p_value=adjusted_by_method.get(method),
        )


def difference_text(name: str, difference: Estimate | None, p_value: float | None) -> str:
    """A model, run or method in a verdict, by its difference from the first.

    A difference is shown if its p-value, by Holm, is below 0.05.
    """
    if difference is None:
        return f"{name}: no difference can be told, shared prompts have equal rewards"
    figures = f"{Cell.of(difference, '+.3f')}, {p_text(p_value)}"
    if p_value is None or p_value >= _SIGNIFICANT:
        return f"{name}: no difference can be told, {figures}"
    return f"{name} is {'better' if difference.value > 0 else 'worse'}, {figures}"


def p_text(p_value: float | None) -> str:
    """``p = 0.031``, ``p < 0.001``, or ``no test``."""
    if p_value is None:
        return "no test"
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


@dataclass(frozen=True)
class Paired:
    """One figure of two runs after the same iteration, on the prompts that both have.

    Attributes:
        evaluation: ``held-out prompts``, or the name of a suite.
        run: Name of the second run.
        against: Name of the first.
        figure: Name of the figure, as in ``prompts.parquet``.
        prompts: Number of the prompts.
        difference: Second run minus first, with a bootstrap over prompts and the p-value of a
            permutation test within prompts; one prompt has neither.
        adjusted_p_value: The p-value by Holm, over all figures that were compared with it.
    """

    evaluation: str
    run: str
    against: str
    iteration: int
    figure: str
    prompts: int
    difference: Estimate
    adjusted_p_value: float | None = None

    def shown(self) -> Cell:
        """The difference with its interval, for a person."""
        return Cell.of(self.difference, "+.3f")


def compared(
    first: Summary,
    second: Summary,
    iteration: int,
    names: Iterable[str],
    suite: str | None = None,
) -> Iterator[Paired]:
    """Compares figures of two runs' policies after an iteration.

    What either run does not have, and figures that are the same for every prompt, are left out.
    Without a suite, the evaluations on held-out prompts are compared.
    """
    place = f"iteration-{iteration}/evaluate"
    place = suite_place(place, suite) if suite else place
    before = prompt_means(first.artifacts.get(place), POLICY)
    now = prompt_means(second.artifacts.get(place), POLICY)
    return _compare(
        before,
        now,
        names,
        evaluation=suite or HELD_OUT,
        run=second.run,
        against=first.run,
        iteration=iteration,
    )


def _compare(
    before: PromptMeans, now: PromptMeans, names: Iterable[str], **place: Any
) -> Iterator[Paired]:
    """Differences of the figures that differ for some prompt that both have."""
    for name in names:
        if name not in before or name not in now:
            continue
        old = before[name]
        new = now[name]
        prompts = sorted(old.keys() & new.keys())
        if all(old[prompt] == new[prompt] for prompt in prompts):
            continue
        first = np.array([old[prompt] for prompt in prompts])
        second = np.array([new[prompt] for prompt in prompts])
        difference = paired_difference(first, second)
        yield Paired(**place, figure=name, prompts=len(prompts), difference=difference)


def against_base(evaluated: Artifact, step: str) -> list[Paired]:
    """Compares the figures that an evaluation's policy and base both have; equal ones left out."""
    base = prompt_means(evaluated, BASE)
    policy = prompt_means(evaluated, POLICY)
    place = {"evaluation": step, "run": POLICY, "against": BASE, "iteration": 0}
    return list(_compare(base, policy, base, **place))


def prompt_means(evaluated: Artifact | None, model: Model) -> PromptMeans:
    """Means of each prompt by figure; none without the evaluation's artifact."""
    means: PromptMeans = {}
    if evaluated is None:
        return means
    for row in pq.read_table(evaluated.file("prompts.parquet")).to_pylist():
        if row["model"] == model:
            figure = means.setdefault(row["figure"], {})
            figure[row["prompt_id"]] = row["total"] / row["count"]
    return means


def adjusted(pairs: Sequence[Paired]) -> list[Paired]:
    """The same with p-values by Holm over all of them."""
    p_values = holm([pair.difference.p_value for pair in pairs])
    return [
        replace(pair, adjusted_p_value=p_value)
        for pair, p_value in zip(pairs, p_values, strict=True)
    ]
