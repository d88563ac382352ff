"""The paper's rows, and their tables: our figures over seeds, and the paper's."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study import FinishedRun, Row, read_rows
from flows.pipeline.grid import listed
from flows.pipeline.presets import configs_folder
from flows.report.differences import p_text
from flows.report.statistics import holm, over_seeds, welch
from flows.report.table import Cell, FittedTable, column_of
from stages.evaluate.statistics import Estimate

BASELINE = "f-DPO"
MISSING = Cell("-")


class PaperColumn(NamedTuple):
    """The figure of a run that a column of the paper's tables shows."""

    suite: str | None
    """Suite that the figure is measured on; None for held-out prompts."""
    figure: str
    """Name of the figure."""
    form: str = ".2%"
    """Format with as many decimals as the paper gives."""


COLUMNS = {
    "WR": PaperColumn(None, "win_rate"),
    "AvgR": PaperColumn(None, "mean_reward", ".4f"),
    "Math": PaperColumn("math500", "accuracy"),
    "pass@16": PaperColumn(None, "pass@16"),
    "math500 pass@16": PaperColumn("math500", "pass@16"),
    "olympiadbench pass@16": PaperColumn("olympiadbench", "pass@16"),
    "aime2025 pass@16": PaperColumn("aime2025", "pass@16"),
}
"""Columns by title."""
COMPARED = ("WR", "AvgR")
"""Columns whose difference from f-DPO is tested."""


@dataclass(frozen=True)
class Findings:
    """Everything that the report contains."""

    title: str
    """Title of the report."""
    rows: Sequence[Row]
    """All rows."""
    reported: Sequence[FinishedRun]
    """Finished runs whose figures are in the tables."""
    tuning: Sequence[FinishedRun]
    """Finished runs by which coefficients were chosen, and the runs of the κ experiment."""
    chosen: Mapping[Row, Mapping[str, Any]]
    """Chosen coefficients."""
    failed: Mapping[str, str]
    """Errors by the names of runs that failed."""


def paper_rows(scale: str) -> list[Row]:
    """The rows of a scale."""
    return read_rows(_table_of(scale), "paper")


def published() -> dict[tuple[str, ...], str]:
    """The paper's figures as it prints them, by the names of a row and a column's title."""
    with _table_of("published").open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    return {tuple(names): value for *names, value in lines[1:]}


def _table_of(name: str) -> Path:
    return configs_folder() / "paper" / "cells" / f"{name}.csv"


def paper_tables(findings: Findings) -> list[FittedTable]:
    """A table for each experiment and setting of which a figure is computed."""
    groups: dict[str, list[Row]] = {}
    for row in findings.rows:
        if row.seeds:
            groups.setdefault(f"{row.setting}: {row.experiment}", []).append(row)
    computed = {run.row for run in findings.reported}
    tables = []
    for title, rows in groups.items():
        if computed.intersection(rows):
            tables.append(_table(title, findings, rows))
    return tables


def _table(title: str, findings: Findings, rows: Sequence[Row]) -> FittedTable:
    papers = published()
    columns: dict[str, list[Cell]] = {}
    for name, column in COLUMNS.items():
        estimates = {row: _estimates(findings, row, column) for row in rows}
        columns[name] = []
        for row in rows:
            paper = papers.get((*row.names, name))
            columns[name].append(_cell(estimates[row], column, paper))
        if name in COMPARED:
            columns[f"{name} − {BASELINE}'s"] = _differences(estimates, column)
    shown = {name: cells for name, cells in columns.items() if set(cells) != {MISSING}}
    done = Counter(run.row for run in findings.reported)
    lines: list[list[str | Cell]] = []
    for row, *cells in zip(rows, *shown.values(), strict=True):
        coefficient = listed(findings.chosen.get(row, {})) or "-"
        seeds = f"{done[row]} of {len(row.seeds)}"
        lines.append([row.method, row.divergence, coefficient, seeds, *cells])
    return FittedTable(title, ["method", "divergence", "coefficient", "seeds", *shown], lines)


def _estimates(findings: Findings, row: Row, column: PaperColumn) -> list[Estimate]:
    """A figure of each finished run of a row; intervals are over prompts."""
    estimates = []
    for run in findings.reported:
        figure = run.figures(column.suite).get(column.figure)
        if run.row == row and figure is not None:
            estimates.append(figure)
    return estimates


def _cell(estimates: Sequence[Estimate], column: PaperColumn, paper: str | None) -> Cell:
    """The mean over seeds with Student's interval, and the paper's figure.

    One seed has an interval over prompts.
    """
    cell = MISSING
    if len(estimates) == 1:
        cell = Cell.of(estimates[0], column.form)
    elif estimates:
        values = [estimate.value for estimate in estimates]
        cell = Cell.of(over_seeds(values, column_of(column.figure).bounds), column.form)
    if paper is None:
        return cell
    return replace(cell, interval=f"{cell.interval} (paper: {paper})".lstrip())


def _differences(estimates: Mapping[Row, Sequence[Estimate]], column: PaperColumn) -> list[Cell]:
    """Difference from f-DPO under the same divergence, p by Welch over seeds, p by Holm."""
    values = {}
    baselines = {}
    for row, of_row in estimates.items():
        values[row] = [estimate.value for estimate in of_row]
        if row.method == BASELINE:
            baselines[row.divergence] = values[row]
    tests = {}
    for row in values:
        base = baselines.get(row.divergence)
        if base and values[row] and row.method != BASELINE:
            tests[row] = welch(base, values[row], column_of(column.figure).bounds)
    adjusted = holm([test.p_value for test in tests.values()])
    cells = dict.fromkeys(values, MISSING)
    for (row, test), by_holm in zip(tests.items(), adjusted, strict=True):
        if by_holm is not None:
            cell = Cell.of(test, f"+{column.form}")
            p_values = f"{p_text(test.p_value)}, by Holm {p_text(by_holm)}"
            cells[row] = replace(cell, interval=f"{cell.interval}, {p_values}")
    return list(cells.values())
