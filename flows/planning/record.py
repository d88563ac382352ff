"""Estimates kept in a run's folder, to be compared with what happened."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError

from flows.execution.run_record import RunRecord
from flows.planning.cost import GIB
from flows.planning.estimate import Estimate
from flows.planning.show import to_json
from stages.contract.atomic import write_atomically
from stages.contract.records import MisplacedError, read_record

_FILE = "estimate.json"


class PlannedCost(BaseModel):
    """Estimate of one step: the fields of it that are read again."""

    seconds: float | None
    """Wall time; None where nothing tells."""
    memory: dict[str, float]
    """Bytes of one process on its device, by term."""

    @property
    def gib(self) -> float:
        """Memory of a process in GiB; 0 where it is not known."""
        return sum(self.memory.values()) / GIB


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
            found[name] = PlannedCost.model_validate(values)
    return found


def _read(record: RunRecord) -> dict[str, Any]:
    try:
        steps = json.loads(read_record(record.path / _FILE))
    except (FileNotFoundError, MisplacedError, ValueError, RecursionError):
        # It only informs, so a damaged one counts as none.
        return {}
    return steps if isinstance(steps, dict) else {}
