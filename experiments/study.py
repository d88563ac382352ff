"""Building blocks of a study: rows of a table, their runs, and the figures of finished runs.

A row of a CSV file is a method under a divergence in a setting. Its runs start from a preset. Runs
that several rows ask for have one name, and are computed once. docs/research.md has the steps of a
custom study.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from flows.execution.plan import plan
from flows.execution.run_record import RunRecord
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.grid import SweepCell, cells, parse_axes
from flows.pipeline.loading import merged, with_fields
from flows.pipeline.presets import configured
from flows.report.status import DONE
from flows.report.summary import Summary, summarise
from stages.contract.errors import UserError
from stages.evaluate.statistics import Estimate
from stages.store.opening import open_store

NAMES = ("experiment", "setting", "method", "divergence")
"""Columns whose values name a row."""


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
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """One coefficient and the values among which it is chosen; empty if it is given."""
    tuning_seeds: tuple[int, ...] = ()
    """Seeds of the runs by which it is chosen; they are not reported."""
    seeds: tuple[int, ...] = ()
    """Seeds of the runs that are reported."""
    prefix: str = "study"
    """Name of the study, with which the names of its runs begin."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Laid over the preset besides; the names of runs do not show them."""

    def names(self) -> tuple[str, str, str, str]:
        """Experiment, setting, method and divergence."""
        return self.experiment, self.setting, self.method, self.divergence

    def coefficients(self) -> list[dict[str, Any]]:
        """Each value of the grid as the field that it sets; one empty one without a grid."""
        for name, values in self.grid.items():
            return [{name: value} for value in values]
        return [{}]


@dataclass(frozen=True, eq=False)
class StudyRun:
    """One run of a row."""

    row: Row
    """The row."""
    planned: SweepCell
    """Its configuration, under the run's name."""
    coefficient: Mapping[str, Any]
    """The value of the row's grid that it has."""
    summary: Summary | None = None
    """Its results once it is finished; see :func:`finished`."""

    @property
    def name(self) -> str:
        """Name of the run in the store."""
        return self.planned.config.name

    def figures(self, suite: str | None = None) -> Mapping[str, Estimate]:
        """Figures of the last evaluated iteration; none before it, or if a suite was not run."""
        if self.summary is None:
            return {}
        if suite is None:
            last = self.summary.last_iteration
            return self.summary.rows[last].figures if last else {}
        rows = self.summary.suites.get(suite)
        return rows[-1].figures if rows else {}


def read_rows(table: Path, prefix: str = "study") -> list[Row]:
    """The rows of a table.

    Args:
        table: A CSV file with a column for each field of :class:`Row` but the prefix.
        prefix: Name of the study, with which the names of its runs begin.

    Raises:
        UserError: A row cannot be read.
    """
    with table.open(encoding="utf-8-sig", newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for number, values in enumerate(lines, 2):
        rows.append(_row(values, prefix, f"{table}:{number}"))
    return rows


def selected(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """The rows with the given experiments, settings, methods and divergences; all if none is.

    Names of one kind are alternatives, names of different kinds are conditions.

    Raises:
        UserError: No row has the names.
    """
    kept = list(rows)
    all_names = set()
    for kind in range(len(NAMES)):
        existing = {row.names()[kind] for row in rows}
        all_names |= existing
        names = existing.intersection(only)
        if names:
            kept = [row for row in kept if row.names()[kind] in names]
    lacking = sorted(set(only) - all_names) or only
    if not kept or not all_names.issuperset(only):
        raise UserError(
            f"no row has {' and '.join(map(repr, lacking))}",
            f"name one, or several that a row has, of: {', '.join(sorted(all_names))}",
        )
    return kept


def _row(values: Mapping[str, str], prefix: str, place: str) -> Row:
    try:
        fields = parse_axes(filter(str.strip, values["fields"].split(";")))
        row = Row(
            experiment=values["experiment"],
            setting=values["setting"],
            method=values["method"],
            divergence=values["divergence"],
            configuration=values["configuration"],
            fields={name: value for name, [value] in fields.items()},
            grid=parse_axes([values["grid"]] if values["grid"] else []),
            tuning_seeds=tuple(map(int, values["tuning_seeds"].split())),
            seeds=tuple(map(int, values["seeds"].split())),
            prefix=prefix,
        )
    except (KeyError, ValueError, AttributeError) as error:
        raise UserError(
            f"{place} is not a row of a study: {error}", "compare it with the other rows"
        ) from error
    if bool(row.grid) != bool(row.tuning_seeds):
        raise UserError(f"{place}: a grid needs tuning seeds, and they need a grid", "give both")
    return row


def tuning_runs(rows: Iterable[Row], overrides: Mapping[str, Any]) -> list[StudyRun]:
    """Runs by which coefficients are chosen: every value of a grid under every tuning seed.

    Args:
        rows: The rows.
        overrides: Sections and fields laid over every configuration, such as the store.

    Raises:
        UserError: A configuration is wrong.
    """
    runs = []
    for row in rows:
        if row.grid:
            for coefficient in row.coefficients():
                runs += _runs(row, coefficient, row.tuning_seeds, overrides)
    return runs


def reported_runs(
    rows: Iterable[Row],
    overrides: Mapping[str, Any],
    chosen: Mapping[Row, Mapping[str, Any]],
) -> list[StudyRun]:
    """Runs that are reported; see :func:`tuning_runs`.

    A row without seeds has no runs, nor has one with a grid before its coefficient is in
    ``chosen``.
    """
    runs = []
    for row in rows:
        if row.seeds and (not row.grid or row in chosen):
            runs += _runs(row, chosen.get(row, {}), row.seeds, overrides)
    return runs


def planned_runs(rows: Sequence[Row], overrides: Mapping[str, Any]) -> dict[str, RunConfig]:
    """All runs by name, where each row has the first coefficient of its grid."""
    first = {row: row.coefficients()[0] for row in rows if row.grid}
    runs = tuning_runs(rows, overrides)
    runs += reported_runs(rows, overrides, first)
    return {run.name: run.planned.config for run in runs}


def _runs(
    row: Row,
    coefficient: Mapping[str, Any],
    seeds: Sequence[int],
    overrides: Mapping[str, Any],
) -> list[StudyRun]:
    config = configured(row.configuration, merged(row.sections, overrides))
    axes = {}
    for name, value in {**row.fields, **coefficient}.items():
        axes[name] = [value]
    planned = cells(f"{row.prefix}-{row.configuration}", config, axes, seeds)
    return [StudyRun(row, cell, coefficient) for cell in planned]


def choose(runs: Iterable[StudyRun], measured: Mapping[str, float]) -> dict[Row, Mapping[str, Any]]:
    """The coefficient of each row: the one with the highest mean over the tuning seeds.

    Runs of one coefficient follow one another. ``measured`` has values by the run's name. Ties go
    to the preset's own value, else to the one that stands first in the row. A row none of whose
    runs was measured has no coefficient; a value whose runs were measured in part has the mean of
    that part.
    """
    chosen = {}
    best: dict[Row, tuple[float, bool]] = {}
    for (row, coefficient), group in groupby(runs, lambda run: (run.row, run.coefficient)):
        values = [measured[run.name] for run in group if run.name in measured]
        if values:
            rank = fmean(values), _is_preset(row, coefficient)
            if row not in best or rank > best[row]:
                best[row] = rank
                chosen[row] = coefficient
    return chosen


def mean_rewards(runs: Iterable[StudyRun]) -> dict[str, float]:
    """Mean rewards of the last iteration by the runs' names; runs without figures are left out."""
    return {run.name: run.figures()["mean_reward"].value for run in runs if run.figures()}


def _is_preset(row: Row, coefficient: Mapping[str, Any]) -> bool:
    preset = with_fields(configured(row.configuration, {}), row.fields, row.configuration)
    changed = with_fields(preset, coefficient, row.configuration)
    return changed.to_values() == preset.to_values()


def finished(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Those whose every step the store has under today's key, with their results.

    A run that several rows ask for is in each.
    """
    summaries: dict[str, Summary | None] = {}
    done = []
    for run in runs:
        if run.name not in summaries:
            config = run.planned.config
            record = RunRecord(open_store(config.store, create=True), run.name)
            summaries[run.name] = None
            # The record of another version of the settings is none.
            with suppress(UserError):
                if _is_finished(record, config):
                    summaries[run.name] = summarise(record)
        if summaries[run.name]:
            done.append(replace(run, summary=summaries[run.name]))
    return done


def _is_finished(record: RunRecord, config: RunConfig) -> bool:
    if not (record.path / "config.json").exists():
        return False
    done = set()
    for step in record.steps():
        if step.state in DONE:
            done.add((step.step, step.key))
    for line in plan(resolve_run(config)):
        if line.action != "reuse" or (line.step, line.key) not in done:
            return False
    return True
