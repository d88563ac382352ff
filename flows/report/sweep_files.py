"""Files of a sweep: JSON, CSV of its combinations and of its runs, and a plot with intervals."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flows.report.plots import Spread, png, spread_figure
from flows.report.statistics import over_seeds
from flows.report.swept import Sweep

_PLOTTED = {
    "mean_reward": "mean reward, held-out prompts",
    "win_rate": "win rate over the base, ties lost",
}


def write_sweep(found: Sweep, folder: Path) -> dict[str, Path]:
    """Writes the files of a sweep into its folder, and returns them by what a person calls them."""
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / "sweep.json"
    document.write_text(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    written = {
        "table": _csv(found.combinations(), folder / "sweep.csv"),
        "runs": _csv(found.runs(), folder / "sweep-runs.csv"),
    }
    panels = {label: _spreads(found, name) for name, label in _PLOTTED.items()}
    if shown := {label: spreads for label, spreads in panels.items() if spreads}:
        written["plot"] = folder / "sweep.png"
        title = f"sweep {found.name}: 95 % intervals over seeds"
        written["plot"].write_bytes(png(spread_figure(title, shown)))
    return written | {"json": document}


def _spreads(found: Sweep, name: str) -> dict[str, Spread]:
    return {
        label: Spread(values, over_seeds(values).interval)
        for label, values in found.values(name).items()
        if values
    }


def _csv(rows: Iterable[Mapping[str, Any]], path: Path) -> Path:
    """Writes records with full precision; a column for each name that any of them has."""
    records = list(rows)
    names = dict.fromkeys(name for record in records for name in record)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(records)
    return path
