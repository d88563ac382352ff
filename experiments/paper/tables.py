"""The paper's cells, and their tables: our figures over seeds, and the paper's."""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.study import Row, StudyRun, listed, read_rows
from flows.pipeline.presets import configs_folder
from flows.report.differences import p_text
from flows.report.statistics import holm, over_seeds, welch
from flows.report.table import Cell, FittedTable, figure_of
from stages.evaluate.statistics import Estimate

BASELINE = "f-DPO"
MISSING = Cell("–")


class Figure(NamedTuple):
    """A figure of the paper and its place in a run."""

    title: str
    """Title of its column."""
    suite: str | None
    """Suite that it is measured on; None for held-out prompts."""
    name: str
    """Its name in a row of figures."""
    whole: float | None = 100.0
    """The largest share in the paper's unit; None for any other figure."""
    form: str = ".2f"
    """Format with as many decimals as the paper gives."""


COMPARED = (
    Figure("WR", None, "win_rate"),
    Figure("AvgR", None, "mean_reward", whole=None, form=".4f"),
)
"""Figures whose difference from f-DPO is tested."""
FIGURES = (
    *COMPARED,
    Figure("Math", "math500", "accuracy"),
    Figure("pass@16", None, "pass@16"),
    Figure("math500 pass@16", "math500", "pass@16"),
    Figure("olympiadbench pass@16", "olympiadbench", "pass@16"),
    Figure("aime2025 pass@16", "aime2025", "pass@16"),
)
CELLS_HEADER = (
    "experiment",
    "setting",
    "method",
    "divergence",
    "configuration",
    "coefficient chosen",
    "runs",
)


@dataclass(frozen=True)
class Findings:
    """Everything that the report contains."""

    title: str
    """Title of the report."""
    rows: Sequence[Row]
    """All cells."""
    reported: Sequence[StudyRun]
    """Finished runs whose figures are in the tables."""
    tuning: Sequence[StudyRun]
    """Finished runs by which coefficients were chosen, and the runs of the κ experiment."""
    chosen: Mapping[Row, Mapping[str, Any]]
    """Coefficients of the cells with a grid."""
    failed: Mapping[str, str]
    """Errors by the names of runs that failed."""

    def estimates(self, row: Row, figure: Figure) -> list[Estimate]:
        """A figure in the paper's unit of each finished run of a cell; intervals over prompts."""
        unit = figure.whole or 1.0
        estimates: list[Estimate] = []
        for run in self.reported:
            estimate = figure_of(run.figures(figure.suite), figure.name)
            if run.row == row and estimate is not None:
                ends = [unit * end for end in estimate.interval or ()]
                estimates.append(Estimate(unit * estimate.value, *ends))
        return estimates

    def values(self, row: Row, figure: Figure) -> list[float]:
        """A figure of each finished run of a cell."""
        return [estimate.value for estimate in self.estimates(row, figure)]


def paper_rows(scale: str) -> list[Row]:
    """The cells of a scale."""
    return read_rows(configs_folder() / "paper" / "cells" / f"{scale}.csv", "paper")


def published() -> dict[tuple[str, ...], str]:
    """The paper's figures as it prints them, by the names of a cell and the figure's title."""
    place = configs_folder() / "paper" / "cells" / "published.csv"
    with place.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    return {tuple(names): value for *names, value in lines[1:]}


def paper_tables(findings: Findings) -> list[FittedTable]:
    """A table for each experiment and setting of which a figure is computed."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in findings.rows:
        if row.seeds:
            groups.setdefault((row.experiment, row.setting), []).append(row)
    computed = {run.row for run in findings.reported}
    return [_table(findings, rows) for rows in groups.values() if computed.intersection(rows)]


def _table(findings: Findings, rows: Sequence[Row]) -> FittedTable:
    papers = published()
    columns: dict[str, list[Cell]] = {}
    for figure in FIGURES:
        columns[figure.title] = []
        for row in rows:
            paper = papers.get((*row.names(), figure.title))
            estimates = findings.estimates(row, figure)
            columns[figure.title].append(_cell(estimates, figure, paper))
    for figure in COMPARED:
        columns[f"{figure.title} − {BASELINE}'s"] = _differences(findings, rows, figure)
    shown = {title: cells for title, cells in columns.items() if set(cells) != {MISSING}}
    lines: list[list[str | Cell]] = []
    for row, *cells in zip(rows, *shown.values(), strict=True):
        lines.append([row.method, row.divergence, *cells])
    title = f"{rows[0].setting}: {rows[0].experiment}"
    return FittedTable(title, ["method", "divergence", *shown], lines)


def _cell(estimates: Sequence[Estimate], figure: Figure, paper: str | None) -> Cell:
    """The mean over seeds with Student's interval, and the paper's figure.

    One seed has an interval over prompts.
    """
    cell = MISSING
    if len(estimates) == 1:
        cell = Cell.of(estimates[0], figure.form)
    elif estimates:
        values = [estimate.value for estimate in estimates]
        cell = Cell.of(over_seeds(values, figure.whole), figure.form)
    return replace(cell, interval=f"{cell.interval} (paper: {paper})".lstrip()) if paper else cell


def _differences(findings: Findings, rows: Sequence[Row], figure: Figure) -> list[Cell]:
    """Difference from f-DPO under the same divergence, p by Welch over seeds, p by Holm."""
    baselines: dict[str, list[float]] = {}
    for row in rows:
        if row.method == BASELINE:
            baselines[row.divergence] = findings.values(row, figure)
    tests: dict[int, Estimate] = {}
    for place, row in enumerate(rows):
        base = baselines.get(row.divergence)
        values = findings.values(row, figure)
        if base and values and row.method != BASELINE:
            tests[place] = welch(base, values, figure.whole)
    adjusted = holm([test.p_value for test in tests.values()])
    cells = [MISSING] * len(rows)
    for (place, test), by_holm in zip(tests.items(), adjusted, strict=True):
        if test.p_value is not None:
            cell = Cell.of(test, f"+{figure.form}")
            shown = f"{cell.interval}, {p_text(test.p_value)}, by Holm {p_text(by_holm)}"
            cells[place] = replace(cell, interval=shown)
    return cells


def coverage(findings: Findings) -> tuple[str, FittedTable]:
    """Seeds of each cell that are computed and asked for: a sentence, and a row for each cell.

    A cell without seeds, of the κ experiment, counts over its grid.
    """
    rows: list[list[str]] = []
    whole = 0
    reported = Counter(run.row for run in findings.reported)
    tuning = Counter(run.row for run in findings.tuning)
    for row in findings.rows:
        done = reported[row] if row.seeds else tuning[row]
        planned = len(row.seeds) or len(row.coefficients()) * len(row.tuning_seeds)
        whole += done >= planned
        coefficient = listed(findings.chosen.get(row, {}))
        shown = f"{coefficient} (of {tuning[row]} runs)" if coefficient else "–"
        configuration = ", ".join(filter(None, (row.configuration, listed(row.fields))))
        rows.append([*row.names(), configuration, shown, f"{done} of {planned}"])
    runs = {run.name for run in (*findings.reported, *findings.tuning)}
    sentence = f"{whole} of {len(rows)} cells are computed whole; {len(runs)} runs are finished."
    return sentence, FittedTable("", CELLS_HEADER, rows)
