"""The paper's rows, and their tables: our figures over seeds, and the paper's."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study import NAMES, Row, StudyRun, read_rows
from flows.pipeline.grid import listed
from flows.pipeline.presets import configs_folder
from flows.report.differences import p_text
from flows.report.statistics import UNBOUNDED, Bounds, holm, over_seeds, welch
from flows.report.table import Cell, FittedTable
from stages.evaluate.statistics import Estimate

BASELINE = "f-DPO"
MISSING = Cell("–")


class PaperColumn(NamedTuple):
    """A column of the paper's tables, and the figure of a run that it shows."""

    title: str
    """Title of the column."""
    suite: str | None
    """Suite that the figure is measured on; None for held-out prompts."""
    figure: str
    """Name of the figure."""
    unit: float = 100.0
    """A share of one in the paper's unit."""
    form: str = ".2f"
    """Format with as many decimals as the paper gives."""
    bounds: Bounds = (0.0, 100.0)
    """Bounds of the figure in the paper's unit."""


COMPARED = (
    PaperColumn("WR", None, "win_rate"),
    PaperColumn("AvgR", None, "mean_reward", 1.0, ".4f", UNBOUNDED),
)
"""Columns whose difference from f-DPO is tested."""
COLUMNS = (
    *COMPARED,
    PaperColumn("Math", "math500", "accuracy"),
    PaperColumn("pass@16", None, "pass@16"),
    PaperColumn("math500 pass@16", "math500", "pass@16"),
    PaperColumn("olympiadbench pass@16", "olympiadbench", "pass@16"),
    PaperColumn("aime2025 pass@16", "aime2025", "pass@16"),
)


@dataclass(frozen=True)
class Findings:
    """Everything that the report contains."""

    title: str
    """Title of the report."""
    rows: Sequence[Row]
    """All rows."""
    reported: Sequence[StudyRun]
    """Finished runs whose figures are in the tables."""
    tuning: Sequence[StudyRun]
    """Finished runs by which coefficients were chosen, and the runs of the κ experiment."""
    chosen: Mapping[Row, Mapping[str, Any]]
    """Coefficients of the rows with a grid."""
    failed: Mapping[str, str]
    """Errors by the names of runs that failed."""

    def estimates(self, row: Row, column: PaperColumn) -> list[Estimate]:
        """A figure in the paper's unit of each finished run of a row; intervals over prompts."""
        estimates = []
        for run in self.reported:
            figure = run.figures(column.suite).get(column.figure)
            if run.row == row and figure is not None:
                ends = [column.unit * end for end in figure.interval or ()]
                estimates.append(Estimate(column.unit * figure.value, *ends))
        return estimates

    def values(self, row: Row, column: PaperColumn) -> list[float]:
        """A figure of each finished run of a row."""
        return [estimate.value for estimate in self.estimates(row, column)]


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
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in findings.rows:
        if row.seeds:
            groups.setdefault((row.experiment, row.setting), []).append(row)
    computed = {run.row for run in findings.reported}
    tables = []
    for rows in groups.values():
        if computed.intersection(rows):
            tables.append(_table(findings, rows))
    return tables


def _table(findings: Findings, rows: Sequence[Row]) -> FittedTable:
    papers = published()
    columns: dict[str, list[Cell]] = {}
    for column in COLUMNS:
        cells = columns.setdefault(column.title, [])
        for row in rows:
            paper = papers.get((*row.names(), column.title))
            estimates = findings.estimates(row, column)
            cells.append(_cell(estimates, column, paper))
    for column in COMPARED:
        columns[f"{column.title} − {BASELINE}'s"] = _differences(findings, rows, column)
    for title, cells in list(columns.items()):
        if set(cells) == {MISSING}:
            del columns[title]
    lines: list[list[str | Cell]] = []
    for row, *cells in zip(rows, *columns.values(), strict=True):
        lines.append([row.method, row.divergence, *cells])
    title = f"{rows[0].setting}: {rows[0].experiment}"
    return FittedTable(title, ["method", "divergence", *columns], lines, left=2)


def _cell(estimates: Sequence[Estimate], column: PaperColumn, paper: str | None) -> Cell:
    """The mean over seeds with Student's interval, and the paper's figure.

    One seed has an interval over prompts.
    """
    cell = MISSING
    if len(estimates) == 1:
        cell = Cell.of(estimates[0], column.form)
    elif estimates:
        values = [estimate.value for estimate in estimates]
        cell = Cell.of(over_seeds(values, column.bounds), column.form)
    if paper is None:
        return cell
    return replace(cell, interval=f"{cell.interval} (paper: {paper})".lstrip())


def _differences(findings: Findings, rows: Sequence[Row], column: PaperColumn) -> list[Cell]:
    """Difference from f-DPO under the same divergence, p by Welch over seeds, p by Holm."""
    baselines = {}
    for row in rows:
        if row.method == BASELINE:
            baselines[row.divergence] = findings.values(row, column)
    tests = {}
    for row in rows:
        base = baselines.get(row.divergence)
        values = findings.values(row, column)
        if base and values and row.method != BASELINE:
            tests[row] = welch(base, values, column.bounds)
    adjusted = holm([test.p_value for test in tests.values()])
    cells = dict.fromkeys(rows, MISSING)
    for (row, test), by_holm in zip(tests.items(), adjusted, strict=True):
        if test.p_value is not None:
            cell = Cell.of(test, f"+{column.form}")
            p_value = p_text(test.p_value)
            shown = f"{cell.interval}, {p_value}, by Holm {p_text(by_holm)}"
            cells[row] = replace(cell, interval=shown)
    return list(cells.values())


def coverage(findings: Findings) -> tuple[str, FittedTable]:
    """Seeds of each row that are computed and asked for: a sentence, and a table.

    A row without seeds, of the κ experiment, counts over its grid.
    """
    lines = []
    whole = 0
    reported = Counter(run.row for run in findings.reported)
    tuning = Counter(run.row for run in findings.tuning)
    for row in findings.rows:
        done = reported[row]
        planned = len(row.seeds)
        if not row.seeds:
            done = tuning[row]
            planned = len(row.coefficients()) * len(row.tuning_seeds)
        whole += done >= planned
        fields = f"{row.configuration}, {listed(row.fields)}".removesuffix(", ")
        coefficient = "–"
        if row in findings.chosen:
            value = listed(findings.chosen[row])
            coefficient = f"{value} (of {tuning[row]} runs)"
        lines.append([*row.names(), fields, coefficient, f"{done} of {planned}"])
    runs = {run.name for run in findings.reported}
    runs |= {run.name for run in findings.tuning}
    sentence = f"{whole} of {len(lines)} rows are computed whole; {len(runs)} runs are finished."
    header = [*NAMES, "configuration", "coefficient chosen", "runs"]
    return sentence, FittedTable("", header, lines)
