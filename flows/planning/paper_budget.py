"""Budget of the paper's cells: tokens, time and disk, and what cells share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.pipeline.paper_cells import (
    BANDIT,
    PaperRun,
    Row,
    by_name,
    reported_runs,
    tuning_runs,
)
from flows.pipeline.presets import store_of
from flows.planning.budget import Budget, budget
from flows.planning.show import count, duration, size


@dataclass(frozen=True)
class CellBudget:
    """Cost of one cell of the paper under one value of its coefficient.

    Attributes:
        row: The cell.
        runs: Its runs, one for each seed.
        tokens: Tokens of all their steps, shared ones included.
        steps: Number of their steps.
        shared: Steps among them that another run asks for as well.
        cached: Steps among them that the store has.
    """

    row: Row
    runs: Sequence[PaperRun]
    tokens: float = 0.0
    steps: int = 0
    shared: int = 0
    cached: int = 0

    def fields(self) -> str:
        """Fields that differ from the preset, with their values, as text."""
        fields = [f"{name}={value}" for name, value in self.row.fields.items()]
        if self.runs and not self.runs[0].tunes and self.row.grid:
            return ", ".join([*fields, *(f"{name}=chosen" for name in self.row.grid)])
        own = self.runs[0].coefficient if self.runs else {}
        return ", ".join([*fields, *(f"{name}={value}" for name, value in own.items())])

    def seeds(self) -> str:
        """Its seeds; those of tuning say so."""
        listed = " ".join(str(each.cell.config.seed) for each in self.runs)
        return f"{listed} (tuning)" if self.runs and self.runs[0].tunes else listed or "-"

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "experiment": self.row.experiment,
            "setting": self.row.setting,
            "method": self.row.method,
            "divergence": self.row.divergence,
            "configuration": self.row.configuration,
            "fields": self.fields(),
            "seeds": [each.cell.config.seed for each in self.runs],
            "tunes": bool(self.runs and self.runs[0].tunes),
            "runs": [each.name for each in self.runs],
            "tokens": self.tokens,
            "steps": self.steps,
            "shared": self.shared,
            "cached": self.cached,
        }


@dataclass(frozen=True)
class PaperBudget:
    """Cost of all cells.

    Attributes:
        cells: The cells in the order of their table; those with a grid once for each value, and
            once for the runs that are reported, which are planned with the first value.
        found: The budget of their runs.
        store: The store.
    """

    cells: Sequence[CellBudget]
    found: Budget
    store: str

    def lines(self, parallel: int) -> list[str]:
        """The budget in a few lines."""
        found = self.found
        asked = sum(len(each) for each in found.of_run.values())
        todo = found.todo()
        tokens = found.tokens(todo)
        lines = [
            f"{len(found.of_run)} runs of {len({each.row for each in self.cells})} cells: "
            f"{asked} steps, {len(found.steps)} of them different, "
            f"{len(found.steps) - len(todo)} in the store",
            f"budget: {count(tokens)} tokens, about {duration(found.seconds(parallel))} with "
            f"{parallel} at a time, {size(found.disk())} on disk"
            + (f", {found.gpu_hours():.3g} GPU-hours" if found.gpu_hours() else ""),
        ]
        if not found.hub_asked:
            lines.append(
                "the hub does not answer: what the store has of runs with inputs from it is unknown"
            )
        return lines + [f"warning: {each}" for each in found.warnings()]

    def to_json(self, parallel: int) -> dict[str, Any]:
        """Values for a JSON document."""
        found = self.found
        return {
            "store": self.store,
            "runs": len(found.of_run),
            "steps": sum(len(each) for each in found.of_run.values()),
            "different_steps": len(found.steps),
            "steps_to_compute": len(found.todo()),
            "tokens": found.tokens(found.todo()),
            "seconds": found.seconds(parallel),
            "gpu_hours": found.gpu_hours(),
            "disk": found.disk(),
            "hub_asked": found.hub_asked,
            "warnings": found.warnings(),
            "cells": [each.to_json() for each in self.cells],
        }


def paper_budget(
    rows: Sequence[Row], overrides: Mapping[str, Any], most_seeds: int | None = None
) -> PaperBudget:
    """Estimates the runs of cells; coefficients that are not chosen yet count as their first value.

    Args:
        rows: The cells.
        overrides: Sections and fields laid over every configuration.
        most_seeds: Seeds of each cell to keep, the first ones; all if None.

    Raises:
        UserError: A configuration is wrong.
    """
    first = {row: row.coefficients()[0] for row in rows if row.grid}
    runs = [
        *tuning_runs(rows, overrides, most_seeds),
        *reported_runs(rows, overrides, first, most_seeds),
    ]
    configs = [each.cell.config for each in by_name(runs).values()]
    found = budget(configs)
    places = {row: place for place, row in enumerate(rows)}
    cells = [CellBudget(row, []) for row in rows if row.experiment == BANDIT]
    cells += [_cell(found, each) for each in _grouped(runs)]
    cells.sort(key=lambda each: places[each.row])
    store = configs[0].store if configs else store_of(overrides)
    return PaperBudget(cells, found, store)


def _grouped(runs: Iterable[PaperRun]) -> list[list[PaperRun]]:
    groups: dict[tuple[Row, bool, str], list[PaperRun]] = {}
    for each in runs:
        groups.setdefault((each.row, each.tunes, str(each.coefficient)), []).append(each)
    return list(groups.values())


def _cell(found: Budget, runs: Sequence[PaperRun]) -> CellBudget:
    identities = [name for each in runs for name in found.of_run[each.name]]
    return CellBudget(
        runs[0].row,
        runs,
        sum(found.steps[name].cost.cost.tokens for name in identities),
        len(identities),
        sum(len(found.shared(each.name)) for each in runs),
        sum(found.steps[name].cost.cached for name in identities),
    )
