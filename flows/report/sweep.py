"""Results of a sweep, a row per combination of the grid over its seeds, and their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flows.pipeline import grid
from flows.pipeline.grid import spread
from flows.report.files import csv_text, json_text, write_file
from flows.report.plots import png, spread_figure
from flows.report.rows import MethodRow, Row, method_rows, p_text, rows_of
from flows.report.summary import Summary
from flows.report.table import COLUMNS, DROPPED_FIRST, Cell, Column, FittedTable, interval_text

# Figures by which combinations of a grid are tested against each other, and which are drawn.
_TESTED = {
    "mean_reward": "mean reward, held-out prompts",
    "win_rate": "win rate over the base, ties lost",
}


@dataclass(frozen=True)
class Finding:
    """Result of one run, or the error that ended it."""

    cell: grid.Cell
    summary: Summary | None
    error: str = ""

    def rows(self) -> Iterator[Row]:
        """Figures of the run after its last iteration."""
        if self.summary is not None:
            yield from rows_of(self.summary, self.cell.label(), self.summary.rows[-1], COLUMNS)


@dataclass(frozen=True)
class Sweep:
    """Results of a sweep.

    Attributes:
        name: Its name.
        findings: What its runs found, the seeds of one combination together.
        files: Addresses of its files, once they are written.
    """

    name: str
    findings: Sequence[Finding]
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Finding]:
        """Runs that did not come to their end."""
        return [each for each in self.findings if each.summary is None]

    @cached_property
    def combinations(self) -> list[MethodRow]:
        """Every figure of every combination over its seeds, tested against the first one."""
        rows = [row for each in self.findings for row in each.rows()]
        return method_rows(rows, [each.cell.label() for each in self.findings])

    def comparisons(self) -> list[MethodRow]:
        """Tests of each combination against the first, for mean reward and win rate."""
        tested = [each for each in self.combinations if each.difference is not None]
        return [each for name in _TESTED for each in tested if each.figure == name]

    def table(self) -> FittedTable:
        """A row per combination of the grid: mean ± standard deviation over the seeds.

        Behind it is Student's 95 % interval of the mean, that of a share within 0 and 1. Figures
        are those of the last iteration. The grid is shown however narrow the terminal is.
        """
        known = {(each.method, each.figure): each for each in self.combinations}
        columns = {each.name: each for each in COLUMNS}
        for name in sorted({figure for _, figure in known} - columns.keys()):
            columns[name] = Column(name.removeprefix("components."), "evaluate", name)
        finished = [each.cell.label() for each in self.findings if each.summary]
        labels = {each.cell.label(): each.cell.label("\n") for each in self.findings}
        rows: list[list[str | Cell]] = [
            [
                *(shown, str(finished.count(label))),
                *(_shown(known.get((label, each.name)), each.form) for each in columns.values()),
            ]
            for label, shown in labels.items()
        ]
        header = ["grid", "runs", *(each.title for each in columns.values())]
        return FittedTable(f"sweep {self.name}", header, rows, 1, DROPPED_FIRST, "sweep.csv", 1)

    def notes(self) -> list[str]:
        """A line for each comparison that has a p-value."""
        first = self.findings[0].cell.label()
        return [
            f"{each.method} against {first}: {each.figure} {each.difference.value:+.3f} "
            f"{interval_text(each.difference.interval, '+.3f')}, {p_text(each.adjusted_p_value)} "
            "(Welch over seeds, Holm)"
            for each in self.comparisons()
            if each.difference is not None and each.difference.p_value is not None
        ]

    def runs(self) -> Iterator[dict[str, Any]]:
        """A record per run: its name, seed, the grid's fields and its figures."""
        for each in self.findings:
            yield {
                "run": each.cell.config.name,
                "seed": each.cell.config.seed,
                **each.cell.fields,
                **{row.figure: row.value for row in each.rows()},
                "error": each.error,
            }

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "sweep": self.name,
            "table": self.table().records(),
            "comparisons": [each.to_json() for each in self.comparisons()],
            "files": dict(self.files),
            "runs": [
                {
                    "run": each.cell.config.name,
                    "seed": each.cell.config.seed,
                    "fields": dict(each.cell.fields),
                    "rows": each.summary.rows if each.summary else None,
                    "error": each.error,
                }
                for each in self.findings
            ],
        }


def _shown(row: MethodRow | None, form: str) -> Cell:
    if row is None:
        return Cell("-")
    return Cell(spread(row.values, form), interval_text(row.mean.interval, ".3g"))


def write_sweep(found: Sweep, folder: Path) -> dict[str, Path]:
    """Writes the files of a sweep into its folder, and returns them by what a person calls them."""
    document = write_file(folder / "sweep.json", json_text(found.to_json()))
    fields = {each.cell.label(): each.cell.fields for each in found.findings}
    table = [{**fields[each.method], **each.to_json()} for each in found.combinations]
    written = {
        "table": write_file(folder / "sweep.csv", csv_text(table)),
        "runs": write_file(folder / "sweep-runs.csv", csv_text(list(found.runs()))),
    }
    panels = {
        label: [each for each in found.combinations if each.figure == name]
        for name, label in _TESTED.items()
    }
    if shown := {label: rows for label, rows in panels.items() if rows}:
        title = f"sweep {found.name}: 95 % intervals over seeds"
        written["plot"] = write_file(folder / "sweep.png", png(spread_figure(title, shown)))
    return written | {"json": document}
