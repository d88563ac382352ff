"""Files of a sweep: JSON, CSV of its combinations and of its runs, and a plot with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flows.report.files import csv_text, json_text, write_file
from flows.report.plots import Spread, png, spread_figure
from flows.report.shares import mean_over_seeds, whole_of
from flows.report.swept import Sweep

_PLOTTED = {
    "mean_reward": "mean reward, held-out prompts",
    "win_rate": "win rate over the base, ties lost",
}


def write_sweep(found: Sweep, folder: Path) -> dict[str, Path]:
    """Writes the files of a sweep into its folder, and returns them by what a person calls them."""
    document = write_file(folder / "sweep.json", json_text(found.to_json()))
    written = {
        "table": _csv(found.combinations(), folder / "sweep.csv"),
        "runs": _csv(found.runs(), folder / "sweep-runs.csv"),
    }
    panels = {label: _spreads(found, name) for name, label in _PLOTTED.items()}
    if shown := {label: spreads for label, spreads in panels.items() if spreads}:
        title = f"sweep {found.name}: 95 % intervals over seeds"
        written["plot"] = write_file(folder / "sweep.png", png(spread_figure(title, shown)))
    return written | {"json": document}


def _spreads(found: Sweep, name: str) -> dict[str, Spread]:
    return {
        label: Spread(values, mean_over_seeds(values, whole_of(name)).interval)
        for label, values in found.values(name).items()
        if values
    }


def _csv(rows: Iterable[Mapping[str, Any]], path: Path) -> Path:
    """Writes records; a column for each name that any of them has."""
    records = list(rows)
    names = dict.fromkeys(name for record in records for name in record)
    return write_file(path, csv_text(records, list(names)))
