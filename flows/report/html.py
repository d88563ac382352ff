"""The HTML report of a run: one file, no network; with its plan against fact by stage."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flows.execution.run_record import RunRecord, StepRecord
from flows.pipeline.config import RunConfig
from flows.planning.show import PlannedCost, planned_costs
from flows.report.figures import Plot
from flows.report.files import render
from flows.report.summary import Summary
from flows.report.verdict import facts, verdict
from flows.runners.attempt_log import attempt_logs, started
from stages.contract.atomic import write_atomically
from stages.contract.data_files import read_data_file
from stages.contract.store import Artifact

_GROUPS = (
    ("results", "Results by iteration"),
    ("learning", "Learning"),
    ("samples", "Samples of the last iteration, in numbers"),
    ("speed", "Speed"),
)


def write(record: RunRecord, summary: Summary, plots: Sequence[Plot]) -> str:
    """Writes ``report.html`` into the run's folder and returns its place.

    Args:
        record: The run.
        summary: Its results.
        plots: Its figures, see :func:`flows.report.figures.draw`.
    """
    values = json.loads(summary.config.to_json())
    page = render(
        "report.html.jinja",
        summary=summary,
        verdict=verdict(summary),
        facts=facts(summary),
        groups=[
            (title, [each for each in plots if each.group == group])
            for group, title in _GROUPS
            if any(each.group == group for each in plots)
        ],
        samples=_samples(summary.last("evaluate")),
        gates=[(t, each.read_json("decision.json")) for t, each in summary.made("promote")],
        spending=spending(record, summary),
        changed=list(_changed(values, json.loads(RunConfig().to_json()))),
        configuration=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
    )
    path = record.path / "report.html"
    write_atomically(path, page)
    return record.store.share(path)


def _samples(artifact: Artifact | None) -> list[dict[str, Any]]:
    """Prompts with samples of both models, those first where their mean scores differ most."""
    if artifact is None:
        return []
    rows = [row for _, row in read_data_file(artifact.file("samples.jsonl"))]
    for row in rows:
        means = [_mean(row[side]) for side in ("policy", "base")]
        row["gain"] = None if None in means else means[0] - means[1]
    return sorted(rows, key=lambda row: -abs(row["gain"] or 0.0))


def _mean(samples: Sequence[Mapping[str, Any]]) -> Any:
    scores = [each["score"] for each in samples if each["score"] is not None]
    return statistics.fmean(scores) if scores else None


def _changed(
    values: Mapping[str, Any], defaults: Mapping[str, Any], at: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Name, value and default of every setting that is not at its default."""
    for name, value in values.items():
        default, place = defaults.get(name), f"{at}{name}"
        if isinstance(value, dict) and isinstance(default, dict) and default:
            yield from _changed(value, default, f"{place}.")
        elif value != default:
            yield place, _short(value), _short(default)


def _short(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


@dataclass
class StageSpending:
    """One stage of a run; seconds are summed over its steps.

    Attributes:
        stage: Its name.
        planned_seconds: Estimate of the steps that this run has computed; None where one of them
            has none.
        seconds: What their last attempts took.
        planned_gib: Largest estimate of a process's memory in GiB, where there is one.
        gib: Largest measured, of a training's first process.
        spent: GPU-hours of the last attempts.
        saved: GPU-hours of steps that an earlier run had computed.
        lost: GPU-hours of attempts that failed or were stopped. What they had done may have been
            gone on from, so it is an upper bound.
    """

    stage: str
    planned_seconds: float | None = 0.0
    seconds: float = 0.0
    planned_gib: float | None = None
    gib: float | None = None
    spent: float = 0.0
    saved: float = 0.0
    lost: float = 0.0


def spending(record: RunRecord, summary: Summary) -> list[StageSpending]:
    """The stages of a run, as far as its steps have ended."""
    found: dict[str, StageSpending] = {}
    planned = planned_costs(record)
    for step in record.steps():
        stage = found.setdefault(step.stage, StageSpending(step.stage))
        resources = getattr(summary.config.resources, step.stage)
        gpus = resources.gpus * resources.nodes
        artifact = summary.artifacts.get(step.step)
        stage.lost += gpus * _lost_seconds(record, step, artifact) / 3600
        if artifact is None:
            continue
        seconds = artifact.manifest.seconds
        if artifact.manifest.run == record.name:
            stage.spent += gpus * seconds / 3600
            stage.seconds += seconds
            _compare(stage, planned.get(step.step), artifact)
        else:
            stage.saved += gpus * seconds / 3600
    return list(found.values())


def _compare(stage: StageSpending, planned: PlannedCost | None, artifact: Artifact) -> None:
    """Adds the estimate of a step, and what a training has measured."""
    seconds = None if planned is None else planned.seconds
    if seconds is None or stage.planned_seconds is None:
        stage.planned_seconds = None
    else:
        stage.planned_seconds += seconds
    if planned is not None and planned.gib:
        stage.planned_gib = max(stage.planned_gib or 0.0, planned.gib)
    if "metrics.jsonl" in artifact.manifest.files:
        rows = read_data_file(artifact.file("metrics.jsonl"))
        peaks = [row["peak_memory_mib"] for _, row in rows if "peak_memory_mib" in row]
        if peaks:
            stage.gib = max(stage.gib or 0.0, max(peaks) / 1024)


def _lost_seconds(record: RunRecord, step: StepRecord, artifact: Artifact | None) -> float:
    """Seconds of all attempts but the one that made the artifact, by their logs."""
    spans = sorted(_attempts(record.store.root / "logs" / step.stage / step.key))
    return sum(end - start for start, end in (spans[:-1] if artifact is not None else spans))


def _attempts(folder: Path) -> Iterator[tuple[float, float]]:
    """Start and end of each attempt at a key: its log's name, and when that was last written."""
    for path in attempt_logs(folder):
        # Others hold the output that a dead orchestrator's stage had after its death.
        if (start := started(path)) is not None:
            yield start, max(start, path.stat().st_mtime)
