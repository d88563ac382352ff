"""Comparison of runs: figures with intervals, tests against the first, curves, distributions.

Runs whose configurations differ only in seed and name are repetitions of one method. Methods are in
the order in which their first runs are given, and are tested against the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flows.report.between import Compared, adjusted, compared
from flows.report.last_iteration import HELD_OUT, Finding, findings_of, last_iteration
from flows.report.shares import difference_over_seeds, mean_over_seeds, whole_of
from flows.report.statistics import Estimate, holm
from flows.report.summary import Summary, kappa_label
from stages.contract.errors import UserError

# Figures by which runs are tested; each further one costs power to Holm's adjustment.
_TESTED = ("mean_reward", "win_rate", "accuracy", "mean_log_pi_ref")


@dataclass(frozen=True)
class Paired:
    """A run against the first one, prompt by prompt."""

    evaluation: str
    run: str
    against: str
    compared: Compared


@dataclass
class Comparison:
    """Everything that is told of several runs.

    Attributes:
        runs: The runs, in the order given.
        methods: Label of each run's method, by the run's name.
        findings: Figures of every run.
        paired: Each run against the first.
        over_seeds: Methods over their seeds; empty where no method has two.
    """

    runs: Sequence[Summary]
    methods: dict[str, str]
    findings: list[Finding] = field(default_factory=list)
    paired: list[Paired] = field(default_factory=list)
    over_seeds: list[OverSeeds] = field(default_factory=list)

    def evaluations(self) -> list[str]:
        """Names of the evaluations, that on held-out prompts first."""
        return list(dict.fromkeys(each.evaluation for each in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "methods": self.methods,
            "figures": [asdict(each) for each in self.findings],
            "paired_differences": [
                {
                    "evaluation": each.evaluation,
                    "run": each.run,
                    "against": each.against,
                    **each.compared.to_json(),
                }
                for each in self.paired
            ],
            "over_seeds": [each.to_json() for each in self.over_seeds],
        }


def compare_summaries(runs: Sequence[Summary]) -> Comparison:
    """Compares runs after their last iterations; see :class:`Comparison`.

    Raises:
        UserError: There are fewer than two runs, one is given twice, or one has no evaluation.
    """
    names = [each.run for each in runs]
    if len(set(names)) < 2 or len(set(names)) != len(names):
        raise UserError(
            f"{', '.join(names) or 'nothing'} cannot be compared",
            "name two or more runs, each once; `geb status` lists them",
        )
    for each in runs:
        if last_iteration(each) is None:
            raise UserError(
                f"run {each.run} has no evaluation", f"`geb resume {each.run}`, or leave it out"
            )
    found = Comparison(runs, method_labels(runs))
    for each in runs:
        found.findings += findings_of(each, found.methods[each.run])
    found.paired = _paired(runs)
    found.over_seeds = methods_over_seeds(found.findings, found.methods)
    return found


def _paired(runs: Sequence[Summary]) -> list[Paired]:
    """Every run against the first, where both have the last iteration of the shorter one."""
    first, *others = runs
    suites = [None, *first.config.suites]
    found = []
    for run in others:
        last = min(last_iteration(first) or 0, last_iteration(run) or 0)
        for suite in suites:
            found += [
                Paired(suite or HELD_OUT, run.run, first.run, each)
                for each in compared(first, run, [last], _TESTED, suite)
            ]
    values = adjusted([each.compared for each in found])
    return [replace(each, compared=value) for each, value in zip(found, values, strict=True)]


# Of a configuration, what repetitions of one method may differ in.
_NOT_OF_THE_METHOD = (
    "name",
    "seed",
    "model",
    "store",
    "resources",
    "execution",
    "estimation",
    "tracking",
)
_ESTIMATES = ("mean", "difference")


@dataclass(frozen=True)
class OverSeeds:
    """A figure of a method over its seeds, against the first method by Welch's t test."""

    evaluation: str
    method: str
    seeds: int
    figure: str
    mean: Estimate
    difference: Estimate | None = None
    p_value: float | None = None
    adjusted_p_value: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document, without nesting."""
        flat = {name: value for name, value in vars(self).items() if name not in _ESTIMATES}
        for name in _ESTIMATES:
            estimate: Estimate | None = getattr(self, name)
            for part in ("value", "low", "high"):
                flat[f"{name}_{part}"] = getattr(estimate, part, None)
        return flat


def method_labels(runs: Sequence[Summary]) -> dict[str, str]:
    """The method of each run by the run's name; repetitions have the same label."""
    labels: dict[str, str] = {}
    known: dict[str, str] = {}
    for run in runs:
        whole = json.loads(run.config.to_json())
        own = {name: value for name, value in whole.items() if name not in _NOT_OF_THE_METHOD}
        method = json.dumps(own, sort_keys=True)
        if method not in known:
            known[method] = _label(run, set(known.values()))
        labels[run.run] = known[method]
    return labels


def _label(run: Summary, taken: set[str]) -> str:
    train = run.config.train
    design = "f-DPO" if train.design == "none" else train.design
    label = ", ".join(filter(None, (design, str(train.divergence), kappa_label(train))))
    return label if label not in taken else f"{label} ({run.run})"


def methods_over_seeds(findings: Sequence[Finding], methods: Mapping[str, str]) -> list[OverSeeds]:
    """Every figure of every method over its seeds; empty where no method has two.

    Args:
        findings: Figures of the runs.
        methods: Label of each run's method, the first method's first.
    """
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for each in findings:
        group = groups.setdefault((each.evaluation, each.figure), {})
        group.setdefault(each.method, []).append(each.value)
    if all(len(values) < 2 for group in groups.values() for values in group.values()):
        return []
    first = next(iter(methods.values()))
    rows = []
    for (evaluation, figure), group in groups.items():
        # A suite may be one that the first method does not have.
        own = group.get(first)
        tests = {
            method: difference_over_seeds(own, values, whole_of(figure))
            for method, values in group.items()
            if own and method != first
        }
        p_values = holm([each.p_value for each in tests.values()])
        tested = {
            method: (test.estimate, test.p_value, p_value)
            for (method, test), p_value in zip(tests.items(), p_values, strict=True)
        }
        rows += [
            OverSeeds(
                *(evaluation, method, len(values), figure),
                mean_over_seeds(values, whole_of(figure)),
                *tested.get(method, (None, None, None)),
            )
            for method, values in group.items()
        ]
    return rows
