"""Building blocks of a study: rows of a table, their runs, and the figures of finished runs.

A row of a CSV file is a method under a divergence in a setting. Its runs start from a preset. Runs
that several rows ask for have one name, and are computed once. docs/research.md has the steps of a
custom study.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.execution.plan import plan
from flows.execution.run_record import RunRecord
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.grid import cells, parse_axes
from flows.pipeline.presets import configured
from flows.report.status import DONE
from flows.report.summary import Summary, summarise
from stages.contract.errors import UserError
from stages.evaluate.statistics import Estimate
from stages.store.opening import open_store

TUNING_SEED = 100
"""Seed of the runs by which coefficients are chosen; they are not reported."""


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a study; a row that is read twice is two rows."""

    experiment: str
    """The table or figure that it belongs to, such as ``main``."""
    setting: str
    """The model, or the task."""
    method: str
    """``f-DPO``, ``GEB-π``, …"""
    divergence: str
    """``KL``, ``Hellinger`` or ``forward KL``."""
    configuration: str
    """Preset that its runs start from."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values by field that differ from the preset."""
    coefficients: Sequence[Mapping[str, Any]] = ()
    """Values of one field, of which the best is chosen; empty if the preset's is taken."""
    seeds: Sequence[int] = ()
    """Seeds of the runs that are reported."""
    prefix: str = "study"
    """Name of the study, with which the names of its runs begin."""

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Experiment, setting, method and divergence."""
        return self.experiment, self.setting, self.method, self.divergence


@dataclass(frozen=True)
class StudyRun:
    """One run of a row, with the coefficient that it has."""

    row: Row
    config: RunConfig
    coefficient: Mapping[str, Any]


@dataclass(frozen=True)
class FinishedRun(StudyRun):
    """A run with its results."""

    summary: Summary

    def figures(self, suite: str | None = None) -> Mapping[str, Estimate]:
        """Figures of the last evaluated iteration; none if the suite was not run."""
        if suite is None:
            return self.summary.rows[self.summary.last_iteration].figures
        rows = self.summary.suites.get(suite)
        return rows[-1].figures if rows else {}


def read_rows(table: Path, prefix: str = "study") -> list[Row]:
    """The rows of a CSV file; names of their runs begin with ``prefix``.

    It has a column for each field of :class:`Row`; the column of the coefficients is ``grid``.

    Raises:
        UserError: A row cannot be read.
    """
    with table.open(encoding="utf-8-sig", newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for number, values in enumerate(lines, 2):
        try:
            rows.append(_row(values, prefix))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{table}:{number} is not a row of a study: {error}",
                "compare it with the other rows",
            ) from error
    return rows


def _row(values: dict[str, Any], prefix: str) -> Row:
    fields = parse_axes(filter(str.strip, values.pop("fields").split(";")))
    coefficients = []
    for name, grid in parse_axes(filter(None, [values.pop("grid")])).items():
        coefficients = [{name: value} for value in grid]
    seeds = [int(seed) for seed in values.pop("seeds").split()]
    if coefficients and TUNING_SEED in seeds:
        raise ValueError(f"seed {TUNING_SEED} chooses the coefficient; report others")
    return Row(
        **values,
        fields={name: value for name, [value] in fields.items()},
        coefficients=coefficients,
        seeds=seeds,
        prefix=prefix,
    )


def selected(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """The rows with the given experiments, settings, methods and divergences; all if none is.

    Names of one kind are alternatives, names of different kinds are conditions.

    Raises:
        UserError: No row has a name, or has all of them.
    """
    kept = list(rows)
    every: set[str] = set()
    for kind, of_kind in enumerate(zip(*[row.names for row in rows], strict=True)):
        every.update(of_kind)
        names = set(of_kind).intersection(only)
        kept = [row for row in kept if row.names[kind] in names or not names]
    unknown = sorted(set(only) - every)
    if only and (unknown or not kept):
        raise UserError(
            f"no row has {' and '.join(unknown or only)}",
            f"name one, or several that a row has, of: {', '.join(sorted(every))}",
        )
    return kept


def tuning_runs(rows: Iterable[Row], overrides: Mapping[str, Any]) -> list[StudyRun]:
    """Runs by which coefficients are chosen.

    Args:
        rows: The rows.
        overrides: Sections and fields laid over every configuration, such as the store.

    Raises:
        UserError: A configuration is wrong.
    """
    runs = []
    for row in rows:
        for coefficient in row.coefficients:
            runs += _runs(row, coefficient, [TUNING_SEED], overrides)
    return runs


def reported_runs(
    rows: Iterable[Row],
    overrides: Mapping[str, Any],
    chosen: Mapping[Row, Mapping[str, Any]],
) -> list[StudyRun]:
    """Runs that are reported; see :func:`tuning_runs`.

    A row whose coefficient is still to be chosen has none.
    """
    runs = []
    for row in rows:
        if row.seeds and (row in chosen or not row.coefficients):
            runs += _runs(row, chosen.get(row, {}), row.seeds, overrides)
    return runs


def planned_runs(rows: Sequence[Row], overrides: Mapping[str, Any]) -> dict[str, RunConfig]:
    """All runs by name, where each row has the first of its coefficients."""
    first = {row: row.coefficients[0] for row in rows if row.coefficients}
    runs = tuning_runs(rows, overrides)
    runs += reported_runs(rows, overrides, first)
    return {run.config.name: run.config for run in runs}


def _runs(
    row: Row,
    coefficient: Mapping[str, Any],
    seeds: Sequence[int],
    overrides: Mapping[str, Any],
) -> list[StudyRun]:
    config = configured(row.configuration, overrides)
    axes = {name: [value] for name, value in {**row.fields, **coefficient}.items()}
    planned = cells(f"{row.prefix}-{row.configuration}", config, axes, seeds)
    return [StudyRun(row, cell.config, coefficient) for cell in planned]


def choose(tuning: Iterable[FinishedRun]) -> dict[Row, Mapping[str, Any]]:
    """The coefficient of each row whose run has the highest mean reward; of equal ones the first.

    A row without a finished run of a finite reward has none.
    """
    chosen = {}
    highest: dict[Row, float] = {}
    for run in tuning:
        reward = run.figures()["mean_reward"].value
        if highest.get(run.row, -math.inf) < reward < math.inf:
            highest[run.row] = reward
            chosen[run.row] = run.coefficient
    return chosen


def finished(runs: Iterable[StudyRun]) -> list[FinishedRun]:
    """Runs whose every step the store has under today's key, with their results."""
    done = []
    for run in runs:
        store = open_store(run.config.store, create=True)
        # The record of another version of the settings is none.
        with suppress(UserError):
            record = RunRecord(store, run.config.name)
            if not _is_finished(record, run.config):
                continue
            summary = summarise(record)
            # Its evaluations may be damaged.
            if summary.last_iteration:
                done.append(FinishedRun(**vars(run), summary=summary))
    return done


def _is_finished(record: RunRecord, config: RunConfig) -> bool:
    done = {(step.step, step.key) for step in record.steps() if step.state in DONE}
    if not done:
        return False
    for line in plan(resolve_run(config)):
        if line.action != "reuse" or (line.step, line.key) not in done:
            return False
    return True
