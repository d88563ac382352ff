"""Plan against fact of a run by stage: time, memory, and GPU-hours spent, saved and lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.execution.run_record import RunRecord, StepRecord
from flows.planning.record import PlannedCost, planned_costs
from flows.report.summary import Summary
from flows.runners.attempt_log import attempt_logs, started
from stages.contract.data_files import read_data_file
from stages.contract.store import Artifact


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
