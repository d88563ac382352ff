"""The paper's cells and their figures: ours over seeds, and the paper's own."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from experiments.study import Row, StudyRun, read_rows
from flows.pipeline.presets import configs_folder
from flows.report.last_iteration import last_iteration
from flows.report.shares import mean_over_seeds
from flows.report.solved import LENGTH_CONTROLLED
from flows.report.statistics import Estimate
from flows.report.summary import Summary
from stages.contract.errors import UserError

Scale = Literal["small", "full"]
SCALES: tuple[str, ...] = get_args(Scale)
BANDIT = "bandit"
"""Experiment that is a run of the flow of the same name."""
KAPPA = "kappa"
"""Experiment whose runs are drawn over κ; it has no seeds beyond those of its grid."""
AVERAGE = "average"
"""In place of a divergence, or of a figure: the mean over all of them."""
PASS = "pass@16"
_PERCENT = 100.0
# Figures by the paper's names: the suite, None for held-out prompts; the name; the paper's unit.
_FIGURES = {
    "WR": (None, "win_rate", _PERCENT),
    "AvgR": (None, "mean_reward", 1.0),
    PASS: (None, PASS, _PERCENT),
    **{f"dist-{n}": (None, f"distinct_{n}", 1.0) for n in range(1, 5)},
    "Alpaca": ("alpaca_eval", LENGTH_CONTROLLED, _PERCENT),
    "Math": ("math500", "accuracy", _PERCENT),
    "coherence": ("coherence", "mean_reward", 1.0),
}


def paper_rows(scale: str, only: Sequence[str] = ()) -> list[Row]:
    """The cells of a scale; see :func:`experiments.study.read_rows`.

    Raises:
        UserError: There is no such scale, or no cell has the names of ``only``.
    """
    if scale not in SCALES:
        raise UserError(f"there is no scale {scale!r}", f"one of: {', '.join(SCALES)}")
    return read_rows(configs_folder() / "paper" / "cells" / f"{scale}.csv", only)


@dataclass(frozen=True)
class Result:
    """One finished run of a cell."""

    run: StudyRun
    summary: Summary

    def row(self, suite: str | None = None) -> Mapping[str, Any]:
        """Figures of the last evaluated iteration; none before it, or if a suite was not run."""
        if suite is None:
            last = last_iteration(self.summary)
            return {} if last is None else self.summary.rows[last]
        found = [each for each in self.summary.suites if each.name == suite]
        return found[0].rows[-1] if found else {}

    def value(self, figure: str) -> Estimate | None:
        """A figure in the paper's unit, with its interval over prompts; None where it is not known.

        Args:
            figure: ``WR`` (win rate, percent), ``AvgR``, ``dist-1`` … ``dist-4``, ``Alpaca``,
                ``Math``, ``coherence``, ``pass@16`` on held-out prompts, or the name of a suite for
                its pass@16 (all percent).
        """
        suite, name, factor = _FIGURES.get(figure, (figure, PASS, _PERCENT))
        row = self.row(suite)
        value = row.get(name, row.get("solved", {}).get(name))
        if value is None:
            return None
        low, high = row["intervals"].get(name) or (None, None)
        ends = (None if end is None else factor * end for end in (low, high))
        return Estimate(factor * value, *ends)


def whole_of(figure: str) -> float | None:
    """The largest share in the unit of the paper, 1 or 100; None for a figure that is no share.

    Args:
        figure: See :meth:`Result.value`.
    """
    if figure in ("AvgR", "coherence"):
        return None
    return 1.0 if figure.startswith("dist-") else _PERCENT


@dataclass(frozen=True)
class Published:
    """A figure that the paper gives, as it is printed there."""

    table: str
    setting: str
    method: str
    divergence: str
    figure: str
    value: str
    deviation: str = ""

    def __str__(self) -> str:
        return f"{self.value} ± {self.deviation}" if self.deviation else self.value


def published() -> list[Published]:
    """Every figure of the paper's tables."""
    place = configs_folder() / "paper" / "cells" / "published.csv"
    with place.open(encoding="utf-8", newline="") as file:
        return [Published(**each) for each in csv.DictReader(file)]


@dataclass(frozen=True)
class Findings:
    """Everything that the report is made of.

    Attributes:
        scale: ``small`` or ``full``.
        rows: All cells of the scale.
        reported: Finished runs that are reported.
        tuning: Finished runs by which coefficients were chosen, and those of the κ experiment.
        chosen: Coefficients that were chosen.
        failed: Errors by the names of runs that failed.
    """

    scale: str
    rows: Sequence[Row]
    reported: Sequence[Result]
    tuning: Sequence[Result]
    chosen: Mapping[Row, Mapping[str, Any]]
    failed: Mapping[str, str]

    @cached_property
    def published(self) -> Sequence[Published]:
        """The paper's figures."""
        return published()

    def settings(self, *experiments: str) -> list[str]:
        """Settings of the cells of experiments, in their order."""
        return list(
            dict.fromkeys(each.setting for each in self.rows if each.experiment in experiments)
        )

    def methods(self, setting: str, *experiments: str) -> list[str]:
        """Methods of a setting, in the order of their cells."""
        rows = [each for each in self.rows if each.experiment in experiments]
        return list(dict.fromkeys(each.method for each in rows if each.setting == setting))

    def results(self, cell: tuple[str, str, str, str]) -> list[Result]:
        """Finished runs of one cell, one for each seed; see :meth:`Row.names`."""
        return [each for each in self.reported if each.run.row.names() == cell]

    def over_seeds(
        self, cell: tuple[str, str, str, str], figure: str
    ) -> tuple[list[float], Estimate | None]:
        """A cell's figure: its value in each run, and their mean.

        Its interval is Student's over seeds; that over prompts where there is one run.
        """
        runs = self.results(cell)
        found = [each for each in (run.value(figure) for run in runs) if each is not None]
        values = [each.value for each in found]
        if len(found) == 1:
            return values, found[0]
        return values, mean_over_seeds(values, whole_of(figure)) if values else None


@dataclass(frozen=True)
class Coverage:
    """Numbers of seeds of one cell: those computed, and those asked for."""

    row: Row
    coefficient: str
    done: int
    asked: int

    def cells(self) -> list[str]:
        """Cells of the table of coverage."""
        fields = ", ".join(f"{name}={value}" for name, value in self.row.fields.items())
        configuration = ", ".join(filter(None, (self.row.configuration, fields)))
        return [*self.row.names(), configuration, self.coefficient, f"{self.done} of {self.asked}"]


def coverage(found: Findings) -> list[Coverage]:
    """Numbers of seeds of each cell, for the κ experiment over its grid."""
    rows = []
    for row in found.rows:
        if row.experiment == BANDIT:
            continue
        tuned = sum(each.run.row == row for each in found.tuning)
        done, asked = sum(each.run.row == row for each in found.reported), len(row.seeds)
        if row.experiment == KAPPA:
            done, asked = tuned, len(row.coefficients()) * len(row.tuning_seeds)
        chosen = found.chosen.get(row, {})
        coefficient = ", ".join(f"{name} = {value}" for name, value in chosen.items())
        shown = f"{coefficient} (of {tuned} runs)" if coefficient else "–"
        rows.append(Coverage(row, shown, done, asked))
    return rows


def headline(found: Findings, covered: Sequence[Coverage]) -> str:
    """A sentence that counts the cells and runs that are computed."""
    whole = sum(each.done >= each.asked for each in covered)
    some = sum(0 < each.done < each.asked for each in covered)
    runs = len({each.run.name for each in (*found.reported, *found.tuning)})
    return (
        f"{whole} of {len(covered)} cells are computed whole, {some} in part; {runs} runs are "
        "finished, those that chose coefficients included."
    )
