"""Results of a sweep, a row per combination of the grid over its seeds, and their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any

from flows.pipeline.grid import Cell, spread
from flows.report.between import p_text
from flows.report.files import csv_text, json_text, write_file
from flows.report.plots import Spread, png, spread_figure
from flows.report.shares import difference_over_seeds, mean_over_seeds, whole_of
from flows.report.statistics import holm
from flows.report.summary import Summary
from flows.report.table import COLUMNS, DROPPED_FIRST, FittedTable, interval_text

# Figures by which combinations of a grid are tested against each other.
TESTED = ("mean_reward", "win_rate")
_INTERVAL_FORM = ".3g"
# Groups of figures within a row, by names of their own.
_PARTS = ("solved", "components")


@dataclass(frozen=True)
class Finding:
    """Result of one run, or the error that ended it."""

    cell: Cell
    summary: Summary | None
    error: str = ""


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

    def rows(self) -> list[dict[str, str]]:
        """A row per combination of the grid: mean ± standard deviation over the seeds.

        Behind it is Student's 95 % interval of the mean, that of a share within 0 and 1. Figures
        are those of the last iteration.
        """
        rows = []
        for label, found in self._groups().items():
            row = {"grid": label, "runs": str(len(found))}
            for column in COLUMNS:
                values = [run[column.name] for run in found]
                row[column.title] = _over_seeds(column.name, values, column.form)
            for part in _PARTS:
                for name in sorted({name for run in found for name in run[part]}):
                    row[name] = _over_seeds(name, [run[part].get(name) for run in found], ".3f")
            rows.append(row)
        return rows

    def comparisons(self) -> list[dict[str, Any]]:
        """Welch's test of each combination against the first, for mean reward and win rate.

        p-values are also adjusted by Holm, over the combinations, figure by figure. None with one
        combination; a p-value is None where there are fewer than two seeds.
        """
        (first, own), *others = self._groups().items()
        rows: list[dict[str, Any]] = []
        for name in TESTED:
            found = []
            for label, runs in others:
                before, now = _known(own, name), _known(runs, name)
                if before and now:
                    found.append((label, difference_over_seeds(before, now, whole_of(name))))
            adjusted = holm([each.p_value for _, each in found])
            rows += [
                {
                    "figure": name,
                    "grid": label,
                    "against": first,
                    "difference": each.estimate.value,
                    "interval": each.estimate.interval,
                    "p_value": each.p_value,
                    "adjusted_p_value": p_value,
                }
                for (label, each), p_value in zip(found, adjusted, strict=True)
            ]
        return rows

    def _groups(self) -> dict[str, list[dict[str, Any]]]:
        """Figures of the runs of each combination after the last iteration."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for each in self.findings:
            last = [each.summary.rows[-1]] if each.summary else []
            groups.setdefault(each.cell.label(), []).extend(last)
        return groups

    def notes(self) -> list[str]:
        """A line for each comparison of :meth:`comparisons` that has a p-value."""
        return [
            f"{row['grid']} against {row['against']}: {row['figure']} {row['difference']:+.3f} "
            f"{interval_text(row['interval'], '+.3f')}, {p_text(row['adjusted_p_value'])} "
            "(Welch over seeds, Holm)"
            for row in self.comparisons()
            if row["p_value"] is not None
        ]

    def table(self) -> FittedTable:
        """The table that a sweep ends with; its grid is shown however narrow the terminal is."""
        rows = self.rows()
        titles = list(dict.fromkeys(title for row in rows for title in row))
        labels = {each.cell.label(): each.cell.label("\n") for each in self.findings}
        shown = [
            [labels[row["grid"]], *(_broken(row.get(title, "-")) for title in titles[1:])]
            for row in rows
        ]
        return FittedTable(
            f"sweep {self.name}",
            titles,
            shown,
            left=1,
            dropped_first=DROPPED_FIRST,
            elsewhere="sweep.csv",
        )

    def combinations(self) -> Iterator[dict[str, Any]]:
        """A record per combination and figure: the grid's fields, mean, deviation and interval."""
        fields = {each.cell.label(): each.cell.fields for each in self.findings}
        for label, runs in self._groups().items():
            for name in self.figures():
                if values := _known(runs, name):
                    found = mean_over_seeds(values, whole_of(name))
                    low, high = found.interval or (None, None)
                    yield {
                        **fields[label],
                        "figure": name,
                        "runs": len(values),
                        "mean": found.value,
                        "standard_deviation": stdev(values) if len(values) > 1 else None,
                        "low": low,
                        "high": high,
                    }

    def runs(self) -> Iterator[dict[str, Any]]:
        """A record per run: its name, seed, the grid's fields and its figures."""
        for each in self.findings:
            last = each.summary.rows[-1] if each.summary else {}
            yield {
                "run": each.cell.config.name,
                "seed": each.cell.config.seed,
                **each.cell.fields,
                **{name: _figure(last, name) for name in self.figures()},
                "error": each.error,
            }

    def figures(self) -> list[str]:
        """Names of the figures: those of every run, of solved problems, and of the oracle."""
        rows = [run for group in self._groups().values() for run in group]
        more = {name for row in rows for part in _PARTS for name in row[part]}
        return [each.name for each in COLUMNS] + sorted(more)

    def values(self, name: str) -> dict[str, list[float]]:
        """Values of a figure in each combination's runs, by the combination's label."""
        return {label: _known(runs, name) for label, runs in self._groups().items()}

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "sweep": self.name,
            "table": self.rows(),
            "comparisons": self.comparisons(),
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


def _over_seeds(name: str, values: Sequence[float | None], form: str) -> str:
    known = [each for each in values if each is not None]
    interval = mean_over_seeds(known, whole_of(name)).interval if known else None
    return f"{spread(values, form)} {interval_text(interval, _INTERVAL_FORM)}".rstrip()


def _known(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = [_figure(run, name) for run in runs]
    return [each for each in found if each is not None]


def _figure(row: Mapping[str, Any], name: str) -> float | None:
    parts = [row.get(part, {}) for part in _PARTS]
    return next((each[name] for each in (row, *parts) if each.get(name) is not None), None)


def _broken(cell: str) -> str:
    """A cell with its interval on a line of its own, which makes the table narrower."""
    return cell.replace(" [", "\n[")


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
