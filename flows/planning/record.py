"""Estimates kept in a run's folder, to be compared with what happened."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from flows.execution.run_record import RunRecord
from flows.planning.cost import GIB
from flows.planning.estimate import Estimate
from flows.planning.show import to_json
from stages.contract.atomic import write_atomically

_FILE = "estimate.json"


@dataclass(frozen=True)
class PlannedCost:
    """Estimate of one step: seconds, and memory of a process in GiB, as far as they are known."""

    seconds: float | None
    gib: float


def save_estimate(record: RunRecord, found: Estimate) -> None:
    """Keeps the estimates of the steps that are to be computed; of others those of before stay."""
    steps = _read(record)
    for each in to_json(found)["steps"]:
        if not each["cached"]:
            steps[each["step"]] = each
    record.path.mkdir(parents=True, exist_ok=True)
    path = record.path / _FILE
    write_atomically(path, json.dumps(steps, indent=1))
    record.store.share(path)


def planned_costs(record: RunRecord) -> dict[str, PlannedCost]:
    """Estimates by step; none where the run was not started with one."""
    return {
        name: PlannedCost(each["seconds"], sum(each["memory"].values()) / GIB)
        for name, each in _read(record).items()
    }


def _read(record: RunRecord) -> dict[str, Any]:
    try:
        steps = json.loads((record.path / _FILE).read_text())
    except (FileNotFoundError, ValueError):
        # It only informs, so a damaged one counts as none.
        return {}
    return steps if isinstance(steps, dict) else {}
