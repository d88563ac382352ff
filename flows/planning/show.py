"""Tables and JSON of an estimate."""

import math
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from flows.planning.cost import GIB
from flows.planning.estimate import Estimate

# The summary names this many of the steps that its sum lacks.
_MOST_NAMED = 4
_FIGURES = ("processes", "tokens", "PFLOP", "memory", "time", "GPU-h")


def summary_line(found: Estimate) -> str:
    """The estimate in one line, for the head of a run."""
    spent, saved = found.gpu_hours(cached=False), found.gpu_hours(cached=True)
    lacking = found.uncounted
    parts = [f"{'at least' if lacking else 'about'} {duration(found.seconds)}"]
    if spent or saved:
        parts.append(f"{spent:.3g} GPU-hours" + (f" ({saved:.3g} saved)" if saved else ""))
        price = found.price(spent)
        if price is not None:
            parts.append(f"price {price:.2f}")
    if lacking:
        parts.append(f"without {', '.join(lacking[:_MOST_NAMED])}")
        parts += [f"{len(lacking) - _MOST_NAMED} more"] if len(lacking) > _MOST_NAMED else []
    return "estimate: " + ", ".join(parts)


def step_table(found: Estimate) -> Table:
    """A line for each step; memory is of one process."""
    figures = (Column(name, justify="right", overflow="fold") for name in _FIGURES)
    table = Table(Column("step", overflow="fold"), "", *figures, box=None, pad_edge=False)
    for each in found.steps:
        cost, known = each.cost, bool(each.cost.tokens)
        table.add_row(
            each.step,
            "[cyan]saved[/]" if each.cached else "[yellow]run[/]",
            f"{each.processes} × {each.device}" if cost.memory else "-",
            count(cost.tokens) if known else "-",
            f"{cost.flops / 1e15:.3g}" if known else "-",
            size(cost.memory) if cost.memory else "-",
            "-" if cost.seconds is None else duration(cost.seconds),
            f"{each.gpu_hours:.3g}" if each.gpus else "-",
        )
    return table


def warning_lines(found: Estimate) -> list[str]:
    """A line for each warning, with the terminal's markup."""
    return [f"[yellow]warning[/] {escape(each)}" for each in found.warnings]


def to_json(found: Estimate) -> dict[str, Any]:
    """Every term of an estimate; bytes, seconds, operations and hours."""
    spent = found.gpu_hours(cached=False)
    return {
        "seconds": found.seconds,
        "steps_without_cost": found.uncounted,
        "gpu_hours": spent,
        "gpu_hours_saved": found.gpu_hours(cached=True),
        "price": found.price(spent),
        "warnings": found.warnings,
        "steps": [
            {**vars(each), "gpu_hours": each.gpu_hours} | vars(each.cost) for each in found.steps
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
