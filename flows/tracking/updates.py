"""Figures of a run as a tracker takes them, read from its summary. Pure but for the artifacts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flows.report.summary import Summary
from flows.report.verdict import verdict
from stages.contract.store import Artifact

ITERATION, TRAIN_STEP = "iteration", "train/step"
# Groups of the pair stage's metrics, which describe the samples that an iteration trains on.
_OF_SAMPLES = {
    "prompts": "generation",
    "responses": "generation",
    "mean_response_tokens": "generation",
    "truncated_share": "generation",
    "mean_reward": "reward",
    "std_reward": "reward",
    "mean_best_reward": "reward",
    "mean_margin": "reward",
    "null_scores": "reward",
    "pairs": "pairs",
    "ties": "pairs",
}
# Of a row: its axis, and groups that have other names as metrics.
_NOT_OF_METRICS = (ITERATION, "components", "solved", "intervals")


@dataclass(frozen=True)
class Update:
    """Metrics that belong together, of an iteration or of a training.

    Attributes:
        name: Its name in the run: `base`, `iteration-1`, `iteration-1/train`.
        axis: Metric that the steps are values of.
        points: Step, and metrics by name.
    """

    name: str
    axis: str
    points: list[tuple[int, dict[str, float]]]

    @property
    def digest(self) -> str:
        """Digest of its content: what was sent already need not be sent again."""
        return digest_of(self.points)


def digest_of(content: object) -> str:
    """SHA-256 of what is sent, as JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def updates(summary: Summary) -> Iterator[Update]:
    """Updates of the iterations that are done, in order."""
    first_step = 0
    for iteration in range(1, summary.config.iterations + 1):
        place = f"iteration-{iteration}"
        decision = summary.read_json(f"{place}/promote", "decision.json")
        if not decision:
            return
        if iteration == 1:
            yield Update("base", ITERATION, [(0, _evaluated(summary, 0))])
        steps = _training(summary.artifacts.get(f"{place}/train"), first_step)
        first_step += len(steps)
        yield Update(f"{place}/train", TRAIN_STEP, steps)
        sampled = _sampled(summary.read_json(f"{place}/pair", "metrics.json"))
        values = sampled | _evaluated(summary, iteration)
        trained = summary.read_json(f"{place}/train", "summary.json")
        values |= _numbers("training", trained.get("metrics", {}))
        values["promotion/promoted"] = float(decision["promoted"])
        yield Update(place, ITERATION, [(iteration, values)])


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


def _sampled(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{group}/{name}": float(metrics[name])
        for name, group in _OF_SAMPLES.items()
        if metrics.get(name) is not None
    }


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
        values[f"{group}/{name}/low"], values[f"{group}/{name}/high"] = low, high
    return values


def _training(artifact: Artifact | None, first_step: int) -> list[tuple[int, dict[str, float]]]:
    """Steps of a training, counted on from those of the iterations before."""
    if artifact is None:
        return []
    lines = artifact.file("metrics.jsonl").read_text().splitlines()
    found = []
    for line in lines:
        record = json.loads(line)
        step = first_step + record.pop("step")
        found.append((step, _numbers("train", record)))
    return found


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of nested values, as ``group/name/name``."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(f"{group}/{name}", value)
        elif isinstance(value, int | float) and math.isfinite(value):
            found[f"{group}/{name}"] = float(value)
    return found
