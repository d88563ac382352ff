"""Estimates kept in a run's folder, to be compared with what happened."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from flows.execution.run_record import RunRecord
from flows.planning.cost import GIB
from flows.planning.estimate import Estimate
from flows.planning.show import to_json
from stages.contract.atomic import write_atomically
from stages.contract.records import MisplacedError, read_record

_FILE = "estimate.json"


@dataclass(frozen=True)
class PlannedCost:
    """Estimate of one step: seconds, and memory of a process in GiB, as far as they are known."""

    seconds: float | None
    gib: float


class _KeptEstimate(BaseModel):
    """Fields of a step's estimate that are read again."""

    seconds: float | None
    memory: dict[str, float]


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
    """Estimates by step, without those that are damaged; none of a run that began without one."""
    found = {}
    for name, values in _read(record).items():
        with suppress(ValidationError):
            kept = _KeptEstimate.model_validate(values)
            found[name] = PlannedCost(kept.seconds, sum(kept.memory.values()) / GIB)
    return found


def _read(record: RunRecord) -> dict[str, Any]:
    try:
        steps = json.loads(read_record(record.path / _FILE))
    except (FileNotFoundError, MisplacedError, ValueError, RecursionError):
        # It only informs, so a damaged one counts as none.
        return {}
    return steps if isinstance(steps, dict) else {}
