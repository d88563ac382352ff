"""Tables and JSON of an estimate, and its record in the folder of a run."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ValidationError
from rich.markup import escape
from rich.table import Table

from flows.execution.run_record import RunRecord
from flows.planning.cost import GIB
from flows.planning.estimate import Estimate, StepEstimate
from stages.contract.atomic import write_atomically
from stages.contract.records import MisplacedError, read_record

_FILE = "estimate.json"
_COLUMNS = ("step", "", "processes", "tokens", "PFLOP", "memory", "disk", "time", "GPU-h")


def summary_line(found: Estimate) -> str:
    """The estimate in one line, for the head of a run."""
    spent, saved = found.gpu_hours(cached=False), found.gpu_hours(cached=True)
    parts = [f"about {duration(found.seconds)}", f"{size(found.disk())} on disk"]
    if spent or saved:
        parts.append(f"{spent:.3g} GPU-hours" + (f" ({saved:.3g} saved)" if saved else ""))
        price = found.price(spent)
        if price is not None:
            parts.append(f"price {price:.2f}")
    return "estimate: " + ", ".join(parts)


def step_table(found: Estimate) -> Table:
    """A line for each step; memory is of one process."""
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        left = column in ("step", "")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for each in found.steps:
        cost, known = each.cost, bool(each.cost.tokens)
        table.add_row(
            each.step,
            "[cyan]saved[/]" if each.cached else "[yellow]run[/]",
            f"{each.processes} × {each.device}" if cost.memory else "-",
            count(cost.tokens) if known else "-",
            f"{cost.flops / 1e15:.3g}" if known else "-",
            size(cost.peak_memory) if cost.memory else "-",
            size(cost.disk) if cost.disk else "-",
            "-" if cost.seconds is None else duration(cost.seconds),
            f"{each.gpu_hours:.3g}" if each.gpus else "-",
        )
    return table


def memory_table(found: Estimate) -> Table:
    """Terms of a process's memory, for the first step of each stage that has a model."""
    first: dict[str, StepEstimate] = {}
    for each in found.steps:
        if each.cost.memory:
            first.setdefault(each.stage, each)
    costs = [each.cost for each in first.values()]
    table = Table(title="memory of a process, GiB", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for stage in first:
        table.add_column(stage, justify="right")
    for name in dict.fromkeys(name for each in costs for name in each.memory):
        values = [each.memory.get(name) for each in costs]
        table.add_row(name, *("-" if each is None else f"{each / GIB:.2f}" for each in values))
    if any(each.host_memory for each in costs):
        table.add_row("in the host's memory", *(f"{each.host_memory / GIB:.2f}" for each in costs))
    table.add_row("in all", *(f"{each.peak_memory / GIB:.2f}" for each in costs))
    return table


def warning_lines(found: Estimate) -> list[str]:
    """A line for each warning, with the terminal's markup."""
    return [f"[yellow]warning[/] {escape(each)}" for each in found.warnings]


def to_json(found: Estimate) -> dict[str, Any]:
    """Every term of an estimate; bytes, seconds, operations and hours."""
    spent = found.gpu_hours(cached=False)
    return {
        "seconds": found.seconds,
        "gpu_hours": spent,
        "gpu_hours_saved": found.gpu_hours(cached=True),
        "price": found.price(spent),
        "disk": found.disk(),
        "warnings": list(found.warnings),
        "steps": [_step_json(each) for each in found.steps],
    }


def _step_json(step: StepEstimate) -> dict[str, Any]:
    values = asdict(step)
    return values | values.pop("cost") | {"gpu_hours": step.gpu_hours}


def duration(seconds: float) -> str:
    """``45 s``, ``12 min`` or ``3.4 h``."""
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def size(number: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def count(number: float) -> str:
    """``512``, ``12.3k``, ``4.5M`` or ``1.2B``."""
    for unit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{suffix}"
    return f"{number:.0f}"


class PlannedCost(BaseModel):
    """Fields of a step's kept estimate that the report reads."""

    seconds: float | None
    """Wall time; None if nothing tells."""
    memory: dict[str, float]
    """Bytes of one process on its device, by term."""

    @property
    def gib(self) -> float:
        """Memory of a process in GiB; 0 if it is not known."""
        return sum(self.memory.values()) / GIB


def save_estimate(record: RunRecord, found: Estimate) -> None:
    """Keeps the estimates of the steps that are to be computed; kept ones of other steps stay."""
    steps = _read(record)
    for each in found.steps:
        if not each.cached:
            steps[each.step] = _step_json(each)
    record.path.mkdir(parents=True, exist_ok=True)
    path = record.path / _FILE
    write_atomically(path, json.dumps(steps, indent=1))
    record.store.share(path)


def planned_costs(record: RunRecord) -> dict[str, PlannedCost]:
    """Estimates by step, without damaged ones; none of a run that began without one."""
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
