"""Differences from the first run, method or model: by prompt, or over seeds, with their tests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.parquet as pq

from flows.report.rows import HELD_OUT, Groups
from flows.report.statistics import difference_of_methods, holm, paired_difference
from flows.report.summary import Summary
from flows.report.table import BASE, POLICY, column_of, shown
from stages.evaluate.statistics import Estimate
from stages.store.base import Artifact

_SIGNIFICANT = 0.05
_SAME = 1e-6
PromptMeans = dict[str, dict[str, float]]
"""Means of each prompt's samples, by figure and prompt."""


@dataclass(frozen=True)
class Difference:
    """One figure of a run, method or model, minus the same figure of the first.

    Attributes:
        evaluation: ``held-out prompts``, or the name of a suite.
        figure: Name of the figure, as in ``metrics.json``.
        estimate: The difference with its interval and p-value, as far as it can be tested.
        test: ``paired`` or ``Welch`` over seeds, see :func:`difference_of_methods`; otherwise the
            number of prompts that both have, for a bootstrap and a permutation within prompts, and
            for runs the iteration.
        adjusted_p_value: The p-value after Holm's correction; None without a test.
    """

    evaluation: str
    name: str
    against: str
    figure: str
    estimate: Estimate
    test: str
    adjusted_p_value: float | None = None

    def shown(self) -> str:
        """The difference with its interval, for a person."""
        return shown(self.estimate, "+.3f")


def compared(first: Summary, second: Summary, names: Sequence[str]) -> Iterator[Difference]:
    """Compares figures of two runs' policies after their last iterations.

    If one of the runs is unfinished, it is after the last iteration that both have. What either
    run does not have, and figures that are the same for every prompt, are left out.
    """
    iterations = [first.last_iteration, second.last_iteration]
    if iterations != [first.config.iterations, second.config.iterations]:
        iterations = [min(iterations)] * 2
    after = " and ".join(map(str, dict.fromkeys(iterations)))
    for suite in ("", *first.config.suites):
        evaluation = suite or HELD_OUT
        before = prompt_means(first.artifact(iterations[0], "evaluate", suite), POLICY)
        now = prompt_means(second.artifact(iterations[1], "evaluate", suite), POLICY)
        for name in names:
            for difference in _by_prompt(before, now, evaluation, second.run, first.run, name):
                yield replace(difference, test=f"{difference.test}, iteration {after}")


def against_base(evaluated: Artifact, evaluation: str) -> Iterator[Difference]:
    """Compares the figures that an evaluation's policy and base both have; equal ones left out."""
    base = prompt_means(evaluated, BASE)
    policy = prompt_means(evaluated, POLICY)
    for name in base:
        yield from _by_prompt(base, policy, evaluation, POLICY, BASE, name)


def _by_prompt(
    before: PromptMeans, now: PromptMeans, evaluation: str, name: str, against: str, figure: str
) -> Iterator[Difference]:
    """The difference of a figure, if it differs for some prompt that both have."""
    old = before.get(figure, {})
    new = now.get(figure, {})
    prompts = sorted(old.keys() & new.keys())
    first = np.array([old[prompt] for prompt in prompts])
    second = np.array([new[prompt] for prompt in prompts])
    # The same answers, scored in other batches, have other last bits.
    second = np.where(np.isclose(first, second, rtol=_SAME, atol=0.0), first, second)
    if not np.array_equal(first, second):
        estimate = paired_difference(first, second)
        test = f"{len(prompts)} prompts"
        yield Difference(evaluation, name, against, figure, estimate, test)


def prompt_means(evaluated: Artifact | None, model: str) -> PromptMeans:
    """Means of each prompt by figure; none without the evaluation's artifact."""
    means: PromptMeans = {}
    if evaluated is None:
        return means
    for row in pq.read_table(evaluated.file("prompts.parquet")).to_pylist():
        if row["model"] == model:
            figure = means.setdefault(row["figure"], {})
            figure[row["prompt_id"]] = row["total"] / row["count"]
    return means


def method_differences(groups: Groups, first: str) -> list[Difference]:
    """Every figure of every method over its seeds, minus the first method's.

    The first method may lack a suite that others have. Holm's correction is over the methods,
    figure by figure.
    """
    differences = []
    for (evaluation, figure), methods in groups.items():
        tests = []
        bounds = column_of(figure).bounds
        for name, values in methods.items():
            if name != first and first in methods:
                estimate, test = difference_of_methods(methods[first], values, bounds)
                tests.append(Difference(evaluation, name, first, figure, estimate, test))
        differences += adjusted(tests)
    return differences


def adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """The same with p-values by Holm over all of them."""
    p_values = holm([difference.estimate.p_value for difference in differences])
    pairs = zip(differences, p_values, strict=True)
    return [replace(difference, adjusted_p_value=p_value) for difference, p_value in pairs]


def difference_text(name: str, difference: Difference | None) -> str:
    """A model, run or method in a verdict, by its difference from the first.

    A difference is shown if its p-value, by Holm, is below 0.05.
    """
    if difference is None:
        return f"{name}: no difference is shown, no shared prompt has other rewards"
    p_value = difference.adjusted_p_value
    figures = f"{difference.shown()}, {p_text(p_value)}"
    if p_value is None or p_value >= _SIGNIFICANT:
        return f"{name}: no difference is shown, {figures}"
    direction = "better" if difference.estimate.value > 0 else "worse"
    return f"{name} is {direction}, {figures}"


def p_text(p_value: float | None) -> str:
    """``p = 0.031``, ``p < 0.001``, or ``no test``."""
    if p_value is None:
        return "no test"
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
