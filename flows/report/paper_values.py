"""Figures of the paper's cells: ours over seeds, and those that the paper gives."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flows.pipeline.paper_cells import PaperRun, Row
from flows.pipeline.presets import configs_folder
from flows.report.last_iteration import last_iteration
from flows.report.shares import mean_over_seeds
from flows.report.solved import LENGTH_CONTROLLED
from flows.report.statistics import Estimate
from flows.report.summary import Summary

AVERAGE = "average"
"""In place of a divergence, or of a figure: the mean over all of them."""
PASS = "pass@16"
_PERCENT = 100.0
# Suites of the columns that the paper names otherwise.
_SUITE_FIGURES = {
    "Alpaca": ("alpaca_eval", LENGTH_CONTROLLED),
    "Math": ("math500", "accuracy"),
}


@dataclass(frozen=True)
class Result:
    """One finished run of a cell."""

    run: PaperRun
    summary: Summary

    def row(self, suite: str | None = None) -> Mapping[str, Any]:
        """Figures of the last iteration; none where the suite was not run."""
        if suite is None:
            return self.summary.rows[last_iteration(self.summary) or 0]
        found = [each for each in self.summary.suites if each.name == suite]
        return found[0].rows[-1] if found else {}

    def value(self, figure: str) -> Estimate | None:
        """A figure in the paper's unit, with its interval over prompts; None where it is not known.

        Args:
            figure: ``WR`` (win rate, percent), ``AvgR``, ``dist-1`` … ``dist-4``, ``Alpaca``,
                ``Math``, ``coherence``, ``pass@16`` on held-out prompts, or the name of a suite for
                its pass@16 (all percent).
        """
        place: tuple[str | None, str]
        if figure in _SUITE_FIGURES:
            place, factor = _SUITE_FIGURES[figure], _PERCENT
        elif figure == "coherence":
            place, factor = ("coherence", "mean_reward"), 1.0
        elif figure.startswith("dist-"):
            place, factor = (None, f"distinct_{figure.removeprefix('dist-')}"), 1.0
        elif figure == "AvgR":
            place, factor = (None, "mean_reward"), 1.0
        elif figure in ("WR", PASS):
            place, factor = (None, "win_rate" if figure == "WR" else PASS), _PERCENT
        else:
            place, factor = (figure, PASS), _PERCENT
        suite, name = place
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


def published(folder: Path | None = None) -> list[Published]:
    """Every figure of the paper's tables.

    Args:
        folder: Folder of ``published.csv``; the shipped one if None.
    """
    place = (folder or configs_folder() / "paper" / "cells") / "published.csv"
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

    def results(self, experiment: str, setting: str, method: str, divergence: str) -> list[Result]:
        """Finished runs of one cell, one for each seed."""
        wanted = experiment, setting, method, divergence
        return [each for each in self.reported if each.run.row.names() == wanted]

    def over_seeds(
        self, experiment: str, setting: str, method: str, divergence: str, figure: str
    ) -> tuple[list[float], Estimate | None]:
        """A cell's figure: its value in each run, and their mean.

        Its interval is Student's over seeds; that over prompts where there is one run.
        """
        runs = self.results(experiment, setting, method, divergence)
        found = [each for each in (run.value(figure) for run in runs) if each is not None]
        values = [each.value for each in found]
        if len(found) == 1:
            return values, found[0]
        return values, mean_over_seeds(values, whole_of(figure)) if values else None

    def in_paper(self, table: str, setting: str, method: str, divergence: str, figure: str) -> str:
        """The paper's own figure; empty where it gives none."""
        wanted = table, setting, method, divergence, figure
        for each in self.published:
            if (each.table, each.setting, each.method, each.divergence, each.figure) == wanted:
                return str(each)
        return ""
