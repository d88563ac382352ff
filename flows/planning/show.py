"""Tables and JSON of an estimate."""

from __future__ import annotations

import math
from typing import Any

from rich.markup import escape
from rich.table import Table

from flows.planning.cost import GIB
from flows.planning.estimate import Estimate, StepEstimate

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
        unit = f"{each.processes} × {each.device}" if each.cost.memory else "-"
        known = bool(each.cost.tokens)
        table.add_row(
            each.step,
            "[cyan]saved[/]" if each.cached else "[yellow]run[/]",
            unit,
            count(each.cost.tokens) if known else "-",
            f"{each.cost.flops / 1e15:.3g}" if known else "-",
            size(each.cost.peak_memory) if each.cost.memory else "-",
            size(each.cost.disk) if each.cost.disk else "-",
            "-" if each.cost.seconds is None else duration(each.cost.seconds),
            f"{each.gpu_hours:.3g}" if each.gpus else "-",
        )
    return table


def memory_table(found: Estimate) -> Table:
    """Terms of a process's memory, for the first step of each stage that has a model."""
    first: dict[str, StepEstimate] = {}
    for each in found.steps:
        if each.cost.memory:
            first.setdefault(each.stage, each)
    names = dict.fromkeys(name for each in first.values() for name in each.cost.memory)
    table = Table(title="memory of a process, GiB", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for stage in first:
        table.add_column(stage, justify="right")
    for name in names:
        values = [each.cost.memory.get(name) for each in first.values()]
        table.add_row(name, *("-" if each is None else f"{each / GIB:.2f}" for each in values))
    hosts = [sum(each.cost.host_memory.values()) for each in first.values()]
    if any(hosts):
        table.add_row("in the host's memory", *(f"{each / GIB:.2f}" for each in hosts))
    table.add_row("in all", *(f"{each.cost.peak_memory / GIB:.2f}" for each in first.values()))
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
        "steps": [
            {
                "step": each.step,
                "stage": each.stage,
                "cached": each.cached,
                "processes": each.processes,
                "gpus": each.gpus,
                "device": each.device,
                "tokens": each.cost.tokens,
                "flops": each.cost.flops,
                "seconds": each.cost.seconds,
                "gpu_hours": each.gpu_hours,
                "memory": dict(each.cost.memory),
                "host_memory": dict(each.cost.host_memory),
                "disk": each.cost.disk,
                "work_disk": each.cost.work_disk,
                "warnings": list(each.warnings),
            }
            for each in found.steps
        ],
    }


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
