"""The paper's experiments as a table of cells, and the runs that each cell asks for.

The tables are ``configs/paper/cells/full.csv`` (the paper's models and data) and ``small.csv``
(tasks that a model trained on this machine can do). A row is one cell of the paper's tables: a
method under a divergence in a setting. Runs that several cells ask for have one name, and are
computed once.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flows.pipeline.grid import Cell, cells, parse_axes
from flows.pipeline.presets import configs_folder, configured
from flows.pipeline.strict_yaml import parse_yaml
from stages.contract.errors import UserError

Scale = Literal["small", "full"]
SCALES: tuple[str, ...] = get_args(Scale)
BANDIT = "bandit"
"""Experiment that is a run of the flow of the same name."""
KAPPA = "kappa"
"""Experiment whose runs are drawn over κ; it has no seeds beyond those of its grid."""


@dataclass(frozen=True)
class Row:
    """One cell of the paper's tables.

    Attributes:
        experiment: ``main``, ``kappa``, ``hard``, ``responses`` or ``bandit``.
        setting: The model, or the task.
        method: ``f-DPO``, ``GEB-π``, …
        divergence: ``KL``, ``Hellinger`` or ``forward KL``.
        configuration: Preset that its runs start from.
        fields: Values by field that differ from the preset.
        grid: One coefficient and the values among which it is chosen; empty where it is given.
        tuning_seeds: Seeds of the runs by which it is chosen; they are not reported.
        seeds: Seeds of the runs that are reported.
    """

    experiment: str
    setting: str
    method: str
    divergence: str
    configuration: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)
    tuning_seeds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()

    def names(self) -> tuple[str, str, str, str]:
        """Experiment, setting, method and divergence."""
        return self.experiment, self.setting, self.method, self.divergence

    def coefficients(self) -> list[dict[str, Any]]:
        """Each value of the grid as the field that it sets; one empty one without a grid."""
        return [{name: each} for name, values in self.grid.items() for each in values] or [{}]


@dataclass(frozen=True)
class PaperRun:
    """One run of a cell.

    Attributes:
        row: The cell.
        cell: Its configuration, under the run's name.
        coefficient: The value of the row's grid that it has.
        tunes: Whether it serves the choice of the coefficient, and is not reported.
    """

    row: Row
    cell: Cell
    coefficient: Mapping[str, Any] = field(hash=False)
    tunes: bool = False

    @property
    def name(self) -> str:
        """Name of the run in the store."""
        return self.cell.config.name


def read_rows(scale: str, only: Sequence[str] = (), folder: Path | None = None) -> list[Row]:
    """The cells of a scale.

    Args:
        scale: ``small`` or ``full``.
        only: Experiments, settings, methods and divergences to keep; all if empty. Of several
            names of one kind each is kept, of different kinds what has both.
        folder: Folder of the tables; the shipped one if None.

    Raises:
        UserError: There is no such scale, no cell has the names of ``only``, or a row cannot be
            read.
    """
    if scale not in SCALES:
        raise UserError(f"there is no scale {scale!r}", f"one of: {', '.join(SCALES)}")
    place = (folder or configs_folder() / "paper" / "cells") / f"{scale}.csv"
    with place.open(encoding="utf-8", newline="") as file:
        rows = [_row(each, f"{place}:{n}") for n, each in enumerate(csv.DictReader(file), 2)]
    kinds = [
        {getattr(row, kind) for row in rows} & set(only)
        for kind in ("experiment", "setting", "method", "divergence")
    ]
    if unknown := set(only) - set().union(*kinds):
        known = {name for row in rows for name in row.names()}
        raise UserError(
            f"no cell has {', '.join(map(repr, sorted(unknown)))}",
            f"experiments, settings, methods and divergences: {', '.join(sorted(known))}",
        )
    found = [
        row
        for row in rows
        if all(not kept or name in kept for name, kept in zip(row.names(), kinds, strict=True))
    ]
    if not found:
        raise UserError(
            f"no cell has {' and '.join(map(repr, only))} at once",
            f"leave one out; `geb paper --scale {scale} --dry-run` lists the cells",
        )
    return found


def _row(values: Mapping[str, str], place: str) -> Row:
    try:
        fields = [each for each in values["fields"].split(";") if each.strip()]
        found = Row(
            values["experiment"],
            values["setting"],
            values["method"],
            values["divergence"],
            values["configuration"],
            dict(_field(each, place) for each in fields),
            parse_axes([values["grid"]] if values["grid"] else []),
            _seeds(values["tuning_seeds"]),
            _seeds(values["seeds"]),
        )
    except (KeyError, ValueError, AttributeError) as error:
        raise UserError(f"{place} is no cell: {error}", "compare it with the other rows") from error
    if bool(found.grid) != bool(found.tuning_seeds):
        raise UserError(f"{place}: a grid needs tuning seeds, and they need a grid", "give both")
    return found


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split())


def _field(text: str, place: str) -> tuple[str, Any]:
    name, separator, value = text.strip().partition("=")
    if not separator:
        raise UserError(f"{place}: {text!r} is not FIELD=VALUE", "write train.bonus_on=all")
    return name, parse_yaml(value, f"{place}, {name}")


def tuning_runs(
    rows: Iterable[Row], overrides: Mapping[str, Any], most_seeds: int | None = None
) -> list[PaperRun]:
    """Runs by which coefficients are chosen: every value of a grid under every tuning seed.

    Args:
        rows: The cells.
        overrides: Sections and fields laid over every configuration, such as the store.
        most_seeds: Seeds of each cell to keep, the first ones; all if None.

    Raises:
        UserError: A configuration is wrong.
    """
    return [
        each
        for row in rows
        for coefficient in row.coefficients()
        if row.grid
        for each in _runs(row, coefficient, row.tuning_seeds[:most_seeds], overrides, tunes=True)
    ]


def reported_runs(
    rows: Iterable[Row],
    overrides: Mapping[str, Any],
    chosen: Mapping[Row, Mapping[str, Any]],
    most_seeds: int | None = None,
) -> list[PaperRun]:
    """Runs that are reported; see :func:`tuning_runs`.

    Args:
        rows: The cells.
        overrides: Sections and fields laid over every configuration.
        chosen: The coefficient of each row that has a grid; rows whose coefficient is missing have
            no runs.
        most_seeds: Seeds of each cell to keep, the first ones; all if None.

    Raises:
        UserError: A configuration is wrong.
    """
    return [
        each
        for row in rows
        if row.experiment != BANDIT and row.seeds and (not row.grid or row in chosen)
        for each in _runs(row, chosen.get(row, {}), row.seeds[:most_seeds], overrides, tunes=False)
    ]


def _runs(
    row: Row,
    coefficient: Mapping[str, Any],
    seeds: Sequence[int],
    overrides: Mapping[str, Any],
    *,
    tunes: bool,
) -> list[PaperRun]:
    config = configured(row.configuration, overrides)
    axes = {name: [value] for name, value in {**row.fields, **coefficient}.items()}
    made = cells(f"paper-{row.configuration}", config, axes, seeds)
    return [PaperRun(row, each, coefficient, tunes) for each in made]


def by_name(runs: Iterable[PaperRun]) -> dict[str, PaperRun]:
    """Runs by their names: one for each, however many cells ask for it."""
    found: dict[str, PaperRun] = {}
    for each in runs:
        found.setdefault(each.name, each)
    return found


def choose(runs: Iterable[PaperRun], measured: Mapping[str, float]) -> dict[Row, Mapping[str, Any]]:
    """The coefficient of each row: the one with the highest mean over the tuning seeds.

    Ties go to the value that stands first in the row. A row none of whose runs was measured has no
    coefficient; a value whose runs were measured in part has the mean of that part.

    Args:
        runs: Tuning runs.
        measured: What is to be high, by the run's name.
    """
    means: dict[Row, list[tuple[float, Mapping[str, Any]]]] = {}
    groups: dict[tuple[Row, str], list[PaperRun]] = {}
    for each in runs:
        groups.setdefault((each.row, str(each.coefficient)), []).append(each)
    for (row, _), group in groups.items():
        known = [measured[each.name] for each in group if each.name in measured]
        if known:
            mean = math.fsum(known) / len(known)
            means.setdefault(row, []).append((mean, group[0].coefficient))
    return {row: max(found, key=lambda pair: pair[0])[1] for row, found in means.items()}
