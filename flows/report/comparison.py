"""Comparison of runs: figures with intervals, tests against the first, curves, distributions.

Runs whose configurations differ only in seed and name are repetitions of one method. Methods are in
the order in which their first runs are given, and are tested against the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow.parquet as pq

from flows.report.between import Compared, adjusted, compared
from flows.report.statistics import Estimate, holm, over_seeds, welch
from flows.report.summary import Summary, kappa_label
from flows.report.table import Figures
from stages.contract.errors import UserError

# Of a configuration, what repetitions of one method may differ in.
_NOT_OF_THE_METHOD = ("name", "seed", "model", "store", "resources", "execution", "estimation")
# Figures by which runs are tested; each further one costs power to Holm's adjustment.
_TESTED = ("mean_reward", "win_rate", "accuracy", "mean_log_pi_ref")
_ESTIMATES = ("mean", "difference")
HELD_OUT = "held-out prompts"
"""Name of the evaluation that every run has, beside those of its suites."""


@dataclass(frozen=True)
class Finding:
    """One figure of one run after its last iteration.

    Attributes:
        evaluation: ``held-out prompts``, or the name of a suite.
        run: Name of the run.
        method: Label of its method.
        seed: Its seed.
        iteration: The iteration.
        figure: Title of the figure.
        value: Its value.
        low: Lower end of the 95 % interval over prompts; None where there is none.
        high: Upper end.
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
class Paired:
    """A run against the first one, prompt by prompt."""

    evaluation: str
    run: str
    against: str
    compared: Compared


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
    found = Comparison(runs, _methods(runs))
    for each in runs:
        found.findings += _findings(each, found.methods[each.run])
    found.paired = _paired(runs)
    found.over_seeds = _over_seeds(found)
    return found


def last_iteration(run: Summary) -> int | None:
    """The last iteration that has an evaluation on held-out prompts."""
    done = [row["iteration"] for row in run.rows[1:] if row["mean_reward"] is not None]
    return done[-1] if done else None


def training_log_pi_ref(run: Summary) -> list[float]:
    """Log π_ref of the responses that the last iteration trained on, chosen and rejected.

    π_ref is what that training measured against (``train.reference``).
    """
    trained = [
        run.artifacts[step]
        for t in range(1, run.config.iterations + 1)
        if (step := f"iteration-{t}/train") in run.artifacts
    ]
    if not trained:
        return []
    table = pq.read_table(trained[-1].file("reference_logprobs.parquet"))
    sums = []
    for side in ("chosen_logprobs", "rejected_logprobs"):
        sums += [sum(each) for each in table[side].to_pylist()]
    return sums


def _methods(runs: Sequence[Summary]) -> dict[str, str]:
    """A label for each run; the same for repetitions of one method."""
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


def _findings(run: Summary, method: str) -> Iterator[Finding]:
    tables: list[tuple[str, Figures]] = [(HELD_OUT, run)]
    tables += [(each.name, each) for each in run.suites]
    for evaluation, table in tables:
        iteration = last_iteration(run) if evaluation == HELD_OUT else None
        row = table.rows[iteration if iteration is not None else -1]
        values = {
            each.title: (row.get(each.name), each.name)
            for each in table.columns
            if each.stage == "evaluate"
        }
        values |= {name: (row["solved"].get(name), name) for name in table.solved()}
        values |= {
            name: (row["components"].get(name), f"components.{name}") for name in table.components()
        }
        for title, (value, name) in values.items():
            if value is not None:
                low, high = row["intervals"].get(name, (None, None))
                place = evaluation, run.run, method, run.config.seed, row["iteration"]
                yield Finding(*place, title, value, low, high)


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
    return [
        Paired(each.evaluation, each.run, each.against, value)
        for each, value in zip(found, values, strict=True)
    ]


def _over_seeds(found: Comparison) -> list[OverSeeds]:
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for each in found.findings:
        group = groups.setdefault((each.evaluation, each.figure), {})
        group.setdefault(each.method, []).append(each.value)
    if all(len(values) < 2 for group in groups.values() for values in group.values()):
        return []
    first = found.methods[found.runs[0].run]
    rows = []
    for (evaluation, figure), group in groups.items():
        # A suite may be one that the first method does not have.
        own = group.get(first)
        tests = {
            method: welch(own, values)
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
                *(evaluation, method, len(values), figure, over_seeds(values)),
                *tested.get(method, (None, None, None)),
            )
            for method, values in group.items()
        ]
    return rows
