"""Methods over their seeds: runs that differ in seed and name alone are repetitions of one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.report.last_iteration import Finding
from flows.report.shares import difference_over_seeds, mean_over_seeds, whole_of
from flows.report.statistics import Estimate, holm
from flows.report.summary import Summary, kappa_label

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
