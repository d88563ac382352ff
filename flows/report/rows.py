"""Figures of finished runs as one long table; over seeds; differences of runs by prompt."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Any

import numpy as np

from flows.pipeline.config import Evaluation, RunConfig
from flows.pipeline.steps import suite_place
from flows.report.prompt_figures import ACCURACY, LENGTH_CONTROLLED, Figures, Samples, means
from flows.report.statistics import difference_of_methods, holm, over_seeds, paired_difference
from flows.report.summary import Summary, kappa_label, last_iteration
from flows.report.table import (
    BASE,
    COLUMNS,
    POLICY,
    Cell,
    Column,
    Estimate,
    figure_of,
    interval_text,
)
from stages.store.base import Artifact

HELD_OUT = "held-out prompts"
"""Name of the evaluation that every run has, beside those of its suites."""
# Settings in which repetitions of one method may differ.
# A sweep's runs move no alias: what is promoted changes nothing that is learnt.
_NOT_OF_THE_METHOD = (
    *("name", "seed", "model", "store", "resources", "execution", "estimation", "tracking"),
    "promote",
)
_SIGNIFICANT = 0.05
_SHARES = {each.name for each in COLUMNS if each.share}
_SHARES |= {ACCURACY, LENGTH_CONTROLLED}


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


@dataclass(frozen=True)
class MethodRow:
    """One figure of a method over its seeds, tested against the first method by a t test.

    Attributes:
        evaluation: As in :class:`Row`.
        values: The figure in each of its runs.
        mean: Their mean with Student's interval.
        difference: Mean minus that of the first method; None for the first.
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

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document or a line of CSV, without nesting."""
        difference = self.difference
        return {
            "evaluation": self.evaluation,
            "method": self.method,
            "figure": self.figure,
            "runs": len(self.values),
            "mean": self.mean.value,
            "standard_deviation": stdev(self.values) if len(self.values) > 1 else None,
            "low": self.mean.low,
            "high": self.mean.high,
            "difference": difference and difference.value,
            "difference_low": difference and difference.low,
            "difference_high": difference and difference.high,
            "test": self.test,
            "p_value": difference and difference.p_value,
            "adjusted_p_value": self.adjusted_p_value,
        }

    def shown(self, form: str) -> Cell:
        """``0.595 ± 0.01``, mean and standard deviation, with the mean's interval."""
        # A mean of numbers of prompts is no whole number.
        form, form_of_ends = (".1f", ".1f") if form == "d" else (form, ".3g")
        mean = format(self.mean.value, form)
        if len(self.values) < 2:
            return Cell(mean)
        interval = interval_text(self.mean.interval, form_of_ends)
        return Cell(f"{mean} ± {format(stdev(self.values), '.2g')}", interval)


def run_rows(run: Summary, method: str) -> Iterator[Row]:
    """Figures of a run's evaluations after its last iteration, suites last."""
    yield from _rows(run, method, run.rows[last_iteration(run) or -1], COLUMNS)
    for suite in run.suites:
        yield from _rows(run, method, suite.rows[-1], suite.columns, suite.name)


def _rows(
    run: Summary,
    method: str,
    row: Mapping[str, Any],
    columns: Sequence[Column],
    evaluation: str = HELD_OUT,
) -> Iterator[Row]:
    """Figures of one iteration, as :attr:`Summary.rows` has it, that are known."""
    components = [f"components.{name}" for name in row["components"]]
    place = evaluation, run.run, method, run.config.seed, row["iteration"]
    for name in (*(each.name for each in columns), *row["solved"], *components):
        found = figure_of(row, name)
        if found is not None:
            yield Row(*place, name, found.value, found.low, found.high)


def method_labels(runs: Sequence[Summary]) -> dict[str, str]:
    """The method of each run by the run's name; repetitions have the same label."""
    labels: dict[str, str] = {}
    known: dict[str, str] = {}
    for run in runs:
        method, train = method_of(run.config), run.config.train
        if method not in known:
            parts = train.method, str(train.divergence), kappa_label(train)
            label = ", ".join(filter(None, parts))
            known[method] = f"{label} ({run.run})" if label in known.values() else label
        labels[run.run] = known[method]
    return labels


def method_of(config: RunConfig) -> str:
    """Everything in a configuration that its repetitions share."""
    whole = config.to_values()
    own = {name: value for name, value in whole.items() if name not in _NOT_OF_THE_METHOD}
    return json.dumps(own, sort_keys=True)


def method_rows(rows: Sequence[Row], methods: Sequence[str]) -> list[MethodRow]:
    """Every figure of every method over its seeds, tested against the first of ``methods``."""
    groups: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for each in rows:
        group = groups.setdefault((each.evaluation, each.figure), {})
        group.setdefault(each.method, []).append((each.seed, each.value))
    return [
        row
        for (evaluation, figure), group in groups.items()
        for row in _methods(evaluation, figure, group, methods[0])
    ]


def _methods(
    evaluation: str, figure: str, group: Mapping[str, list[tuple[int, float]]], first: str
) -> Iterator[MethodRow]:
    whole = 1.0 if figure in _SHARES or figure.startswith("pass@") else None
    # The first method may lack a suite that others have.
    own = group.get(first)
    tests = {
        method: difference_of_methods(own, values, whole)
        for method, values in group.items()
        if own and method != first
    }
    adjusted = dict(zip(tests, holm([each.p_value for each, _ in tests.values()]), strict=True))
    for method, runs in group.items():
        values = [value for _, value in runs]
        tested = *tests.get(method, (None, "")), adjusted.get(method)
        yield MethodRow(evaluation, method, figure, values, over_seeds(values, whole), *tested)


def told(name: str, difference: Estimate | None, p_value: float | None) -> str:
    """A model, run or method in a verdict, by its difference from the first.

    A difference can be told if its p-value, by Holm, is below 0.05.
    """
    if difference is None:
        return f"{name}: no difference can be told, shared prompts have equal rewards"
    found = f"{Cell.of(difference, '+.3f')}, {p_text(p_value)}"
    if p_value is None or p_value >= _SIGNIFICANT:
        return f"{name}: no difference can be told, {found}"
    return f"{name} is {'better' if difference.value > 0 else 'worse'}, {found}"


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
        figure: Name of the figure, see :meth:`flows.report.prompt_figures.Samples.figures`.
        first: Mean over them in the first run.
        second: Mean over them in the second run.
        difference: ``second − first``.
        low: Lower end of its 95 % interval, a bootstrap over prompts; None for one prompt.
        p_value: P-value of a permutation test within prompts; None for one prompt.
        adjusted_p_value: The same by Holm, over all figures that were compared with it.
    """

    evaluation: str
    run: str
    against: str
    iteration: int
    figure: str
    prompts: int
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    p_value: float | None
    adjusted_p_value: float | None = None

    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return Estimate(self.difference, self.low, self.high)

    def shown(self) -> Cell:
        """The difference with its interval, for a person."""
        return Cell.of(self.estimate(), "+.3f")


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
    before, now = (_figures(each, iteration, suite) for each in (first, second))
    place = suite or HELD_OUT, second.run, first.run, iteration
    return _every_paired(place, before, now, names)


def _every_paired(
    place: tuple[str, str, str, int], before: Figures, now: Figures, names: Iterable[str]
) -> Iterator[Paired]:
    for name in names:
        if name in before and name in now:
            yield from _paired((*place, name), means(before[name]), means(now[name]))


def _paired(
    place: tuple[str, str, str, int, str], old: dict[str, float], new: dict[str, float]
) -> Iterator[Paired]:
    shared = sorted(old.keys() & new.keys())
    if any(old[prompt] != new[prompt] for prompt in shared):
        first, second = (np.array([values[each] for each in shared]) for values in (old, new))
        found = paired_difference(first, second)
        at = len(shared), float(first.mean()), float(second.mean())
        yield Paired(*place, *at, found.value, found.low, found.high, found.p_value)


def against_base(
    artifacts: Mapping[str, Artifact],
    evaluation: Evaluation,
    step: str,
) -> list[Paired]:
    """Compares the figures that an evaluation's policy and base both have; equal ones left out."""
    base = Samples.of(artifacts, evaluation, step, "base", BASE).figures()
    policy = Samples.of(artifacts, evaluation, step, "policy", POLICY).figures()
    return list(_every_paired((step, POLICY, BASE, 0), base, policy, base))


def adjusted(found: Sequence[Paired]) -> list[Paired]:
    """The same with p-values by Holm over all of them."""
    values = holm([each.p_value for each in found])
    return [
        replace(each, adjusted_p_value=value) for each, value in zip(found, values, strict=True)
    ]


def parted(summary: Summary, suite: str) -> Paired | None:
    """Fall of a second opinion's mean reward while the reward that is trained for rose.

    It is measured from the iteration, or the base, that the second opinion likes best to the last
    one; None if nothing is shown to have fallen (Gao et al. 2022, arXiv 2210.10760, on gold rewards
    that fall while the trained reward rises).
    """
    scores = {
        row["iteration"]: row["mean_reward"]
        for each in summary.suites
        if each.name == suite
        for row in each.rows
        if row["mean_reward"] is not None
    }
    if not scores:
        return None
    last, best = max(scores), max(scores, key=lambda iteration: scores[iteration])
    trained_for = [summary.rows[each]["mean_reward"] for each in (best, last)]
    if None in trained_for or trained_for[1] <= trained_for[0]:
        return None
    before, now = (
        means(_figures(summary, each, suite).get("mean_reward", {})) for each in (best, last)
    )
    place = suite, f"iteration {last}", f"iteration {best}" if best else "the base", last
    found = next(_paired((*place, "mean_reward"), before, now), None)
    return found if found and found.high is not None and found.high < 0 else None


def _figures(summary: Summary, iteration: int, suite: str | None) -> Figures:
    """Figures of a run's policy after an iteration, prompt by prompt; none before it is there.

    Those of iteration 0 are the base's.
    """
    config = summary.config if suite is None else summary.config.for_suite(suite)
    numbers = [iteration] if iteration else range(1, summary.config.iterations + 1)
    places = [f"iteration-{each}/evaluate" for each in numbers]
    places = [suite_place(each, suite) if suite else each for each in places]
    place = next((each for each in places if each in summary.artifacts), None)
    if place is None:
        return {}
    if iteration:
        return Samples.of(summary.artifacts, config.evaluation, place, place, POLICY).figures()
    prefix = suite_place("base", suite) if suite else "base"
    return Samples.of(summary.artifacts, config.evaluation, place, prefix, BASE).figures()
