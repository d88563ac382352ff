"""Comparison of runs: figures with intervals, tests against the first, curves, distributions.

Runs whose configurations differ only in seed and name are repetitions of one method. Methods are in
the order in which their first runs are given, and are tested against the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flows.report.between import Compared, adjusted, compared
from flows.report.last_iteration import HELD_OUT, Finding, findings_of, last_iteration
from flows.report.methods import OverSeeds, method_labels, methods_over_seeds
from flows.report.summary import Summary
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
