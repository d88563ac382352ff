"""Figures of a run as a tracker takes them, read from its summary. Pure but for the artifacts."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from flows.report.html import verdict
from flows.report.summary import Summary
from stages.store.base import Artifact

ITERATION = "iteration"
TRAIN_STEP = "train/step"
# Groups of the pair stage's metrics, which describe the samples that an iteration trains on.
_OF_SAMPLES = {
    "generation": ("prompts", "responses", "mean_response_tokens", "truncated_share"),
    "reward": ("mean_reward", "std_reward", "mean_best_reward", "mean_margin", "null_scores"),
    "pairs": ("pairs", "ties"),
}
# Columns of a row: its axis, and groups that have other names as metrics.
_NOT_OF_METRICS = (ITERATION, "components", "solved", "intervals")


Points = list[tuple[int, dict[str, float]]]
"""Steps, and metrics by name."""


def updates(summary: Summary) -> Iterator[tuple[str, str, Points]]:
    """Metrics of the iterations that are done, in order.

    Each update has its name in the run (`base`, `iteration-1`, `iteration-1/train`), the metric
    that its steps are values of, and its points.
    """
    first_step = 0
    for iteration in range(1, summary.config.iterations + 1):
        place = f"iteration-{iteration}"
        decision = summary.read_json(f"{place}/promote", "decision.json")
        if not decision:
            return
        if iteration == 1:
            yield "base", ITERATION, [(0, _evaluated(summary, 0))]
        steps = _training(summary.artifacts.get(f"{place}/train"), first_step)
        first_step += len(steps)
        yield f"{place}/train", TRAIN_STEP, steps
        values = _evaluated(summary, iteration)
        sampled = summary.read_json(f"{place}/pair", "metrics.json")
        for group, names in _OF_SAMPLES.items():
            values |= _numbers(group, {name: sampled.get(name) for name in names})
        trained = summary.read_json(f"{place}/train", "summary.json")
        values |= _numbers("training", trained.get("metrics", {}))
        values["promotion/promoted"] = float(decision["promoted"])
        yield place, ITERATION, [(iteration, values)]


def links(summary: Summary, report: str) -> dict[str, str]:
    """Names and places that a run is linked with, by title."""
    model = summary.config.model or summary.config.name
    found = {
        "name": summary.run,
        "store": summary.store,
        "report": report,
        "verdict": verdict(summary).sentence,
        "model": model,
    }
    last = f"iteration-{summary.config.iterations}/promote"
    if registered := summary.read_json(last, "registry.json"):
        found["model_version"] = f"{model}:{registered['version']}"
        promoted = [f"{model}@{name}" for name in registered["aliases"]]
        found["model_aliases"] = ", ".join(promoted) or "none: a gate held it back"
    if summary.checkpoint:
        found["checkpoint"] = summary.checkpoint
    return found


def _evaluated(summary: Summary, iteration: int) -> dict[str, float]:
    """Evaluation after an iteration, 0 for the base's; suites have a group of their own."""
    metrics = summary.read_json(f"iteration-{iteration or 1}/evaluate", "metrics.json")
    own = {
        name.removeprefix("base_"): value
        for name, value in metrics.items()
        if name.startswith("base_") == (iteration == 0)
    }
    values = _numbers("evaluation", own)
    values |= _figures("evaluation", summary.rows[iteration])
    for suite in summary.suites:
        for row in suite.rows:
            if row["iteration"] == iteration:
                values |= _of_suite(f"suites/{suite.name}", row)
    return values


def _of_suite(group: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a suite's row, each under the name that it has among an evaluation's."""
    own = {name: value for name, value in row.items() if name not in _NOT_OF_METRICS}
    own["reward_components"] = row.get("components", {})
    return _numbers(group, own) | _figures(group, row)


def _figures(group: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Solved problems and the ends of the 95 % intervals of a row."""
    values = _numbers(group, row.get("solved", {}))
    for figure, (low, high) in row.get("intervals", {}).items():
        # As evaluations name them.
        name = figure.replace("components.", "reward_components/", 1)
        values[f"{group}/{name}/low"] = low
        values[f"{group}/{name}/high"] = high
    return values


def _training(artifact: Artifact | None, first_step: int) -> Points:
    """Steps of a training, counted on from those of the iterations before."""
    if artifact is None:
        return []
    records = map(json.loads, artifact.file("metrics.jsonl").read_text().splitlines())
    return [(first_step + each.pop("step"), _numbers("train", each)) for each in records]


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of nested values, as ``group/name/name``."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(f"{group}/{name}", value)
        elif isinstance(value, int | float) and math.isfinite(value):
            found[f"{group}/{name}"] = float(value)
    return found
