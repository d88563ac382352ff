"""Plan against fact: what a run spent, what the store saved it, and what failed attempts cost."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.execution.run_record import RunRecord, StepRecord
from flows.pipeline.config import RunConfig, StageResources
from flows.planning.cost import GIB, Cost
from flows.planning.estimate import Estimate, StepEstimate
from flows.planning.show import planned_costs, save_estimate
from flows.report.html import spending
from flows.report.summary import Summary
from stages.contract.request import Resources
from stages.contract.stores import open_store

TRAINED = Resources(gpus=4, nodes=2, rendezvous="10.0.0.5:29500")
CONFIG = RunConfig(name="mine", resources=StageResources(train=TRAINED))


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return RunRecord(open_store(str(tmp_path / "store"), create=True), "mine")


def made(folder: Path, run: str, minutes: int, peak_mib: float | None = None) -> Any:
    """An artifact as far as the report reads it."""
    files = {}
    if peak_mib is not None:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps({"peak_memory_mib": peak_mib}))
        files["metrics.jsonl"] = None
    manifest = SimpleNamespace(run=run, seconds=60.0 * minutes, files=files)
    return SimpleNamespace(manifest=manifest, file=lambda name: folder / name)


def ended(record: RunRecord, name: str) -> None:
    record.save_step(
        StepRecord(
            step=name,
            stage="train",
            key=f"key-{name.removeprefix('iteration-')[0]}",
            key_fields={},
            state="done",
            started=0,
        )
    )


def attempt(record: RunRecord, key: str, start: float, seconds: float) -> None:
    folder = record.store.root / "logs" / "train" / key
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%SZ', time.gmtime(start))}-1-1.log"
    path.write_text("")
    os.utime(path, (start + seconds, start + seconds))


def planned(step: str, seconds: float, *, cached: bool = False) -> StepEstimate:
    cost = Cost(seconds=seconds, memory={"weights": 2 * GIB, "runtime": GIB})
    return StepEstimate(step, "train", cached, 8, 8, "h100", cost, ())


def test_spent_saved_and_lost_gpu_hours(record: RunRecord, tmp_path: Path) -> None:
    for name in ("iteration-1/train", "iteration-2/train"):
        ended(record, name)
    attempt(record, "key-1", 1e9, 900)
    attempt(record, "key-1", 1e9 + 2000, 1800)
    artifacts = {
        "iteration-1/train": made(tmp_path / "one", "mine", 30, 4096),
        "iteration-2/train": made(tmp_path / "two", "earlier", 15),
    }
    estimates = (planned("iteration-1/train", 1200), planned("iteration-2/train", 1200))
    save_estimate(record, Estimate(estimates, 0, None, ()))
    [train] = spending(record, Summary("mine", CONFIG, "store", artifacts=artifacts))
    assert dataclasses.asdict(train) == {
        "stage": "train",
        # Of the step that this run has computed.
        "planned_seconds": 1200,
        "seconds": 1800,
        "planned_gib": 3,
        "gib": 4,
        # 8 GPUs for half an hour, a quarter of one, and the first attempt's quarter.
        "spent": 4,
        "saved": 2,
        "lost": 2,
    }


def test_a_step_that_never_ended_has_lost_all_of_its_attempts(record: RunRecord) -> None:
    ended(record, "iteration-1/train")
    attempt(record, "key-1", 1e9, 450)
    [train] = spending(record, Summary("mine", CONFIG, "store"))
    assert (train.spent, train.lost) == (0, 1)


def test_a_run_without_an_estimate_has_facts_alone(record: RunRecord, tmp_path: Path) -> None:
    ended(record, "iteration-1/train")
    artifacts = {"iteration-1/train": made(tmp_path / "one", "mine", 30)}
    [train] = spending(record, Summary("mine", CONFIG, "store", artifacts=artifacts))
    assert (train.planned_seconds, train.seconds) == (None, 1800)


def test_a_resumed_run_keeps_the_estimates_of_what_it_has_computed(record: RunRecord) -> None:
    first = (planned("iteration-1/train", 1200), planned("iteration-2/train", 1200))
    save_estimate(record, Estimate(first, 0, None, ()))
    later = (
        planned("iteration-1/train", 7, cached=True),
        planned("iteration-2/train", 900),
    )
    save_estimate(record, Estimate(later, 0, None, ()))
    found = {name: each.seconds for name, each in planned_costs(record).items()}
    assert found == {"iteration-1/train": 1200, "iteration-2/train": 900}


def test_a_damaged_estimate_counts_as_none(record: RunRecord) -> None:
    record.path.mkdir(parents=True)
    kept = record.path / "estimate.json"
    whole = {"seconds": 5, "memory": {"weights": GIB}}
    kept.write_text(json.dumps({"train": whole, "score": {"seconds": 5}, "pair": None}))
    assert {name: each.gib for name, each in planned_costs(record).items()} == {"train": 1}
    kept.write_text("[")
    assert planned_costs(record) == {}
