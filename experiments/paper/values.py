"""The paper's cells and their figures: ours over seeds, and the paper's own."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from experiments.study import Row, StudyRun, listed, read_rows
from flows.pipeline.presets import configs_folder
from flows.report.prompt_figures import LENGTH_CONTROLLED
from flows.report.statistics import Estimate, over_seeds
from flows.report.table import figure_of

Scale = Literal["small", "full"]
SCALES: tuple[str, ...] = get_args(Scale)
BANDIT = "bandit"
"""Experiment that is a run of the flow of the same name."""
BASELINE = "f-DPO"
DIVERGENCES = ("KL", "Hellinger", "forward KL")
PASS = "pass@16"
Names = tuple[str, str, str, str]
"""Experiment, setting, method and divergence of a cell."""


class Figure(NamedTuple):
    """A figure of the paper among those of a run.

    Attributes:
        suite: Suite that it is measured on; None for held-out prompts.
        name: Its name in ``metrics.json``.
        whole: The largest share in the paper's unit, 1 or 100; None if the figure is no share.
        form: Format with as many decimals as the paper gives.
    """

    suite: str | None
    name: str
    whole: float | None = 100.0
    form: str = ".2f"

    @classmethod
    def called(cls, title: str) -> Figure:
        """The figure of a column; any other title is a suite, for its pass@16."""
        return _FIGURES.get(title, cls(title, PASS))


_FIGURES = {
    "WR": Figure(None, "win_rate"),
    "AvgR": Figure(None, "mean_reward", None, ".4f"),
    PASS: Figure(None, PASS),
    **{f"dist-{n}": Figure(None, f"distinct_{n}", 1.0, ".4f") for n in range(1, 5)},
    "Alpaca": Figure("alpaca_eval", LENGTH_CONTROLLED),
    "Math": Figure("math500", "accuracy"),
    "coherence": Figure("coherence", "mean_reward", None),
}


def paper_rows(scale: str, only: Sequence[str] = ()) -> list[Row]:
    """The cells of a scale, ``small`` or ``full``; see :func:`experiments.study.read_rows`."""
    return read_rows(configs_folder() / "paper" / "cells" / f"{scale}.csv", only, "paper")


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
    reported: Sequence[StudyRun]
    tuning: Sequence[StudyRun]
    chosen: Mapping[Row, Mapping[str, Any]]
    failed: Mapping[str, str]

    def results(self, cell: Names) -> list[StudyRun]:
        """Finished runs of one cell, one for each seed."""
        return [each for each in self.reported if each.row.names() == cell]

    def over_seeds(self, cell: Names, figure: Figure) -> tuple[list[float], Estimate | None]:
        """A cell's figure in the paper's unit: its value in each run, and their mean.

        Its interval is Student's over seeds; that over prompts if there is one run.
        """
        found = [figure_of(run.figures(figure.suite), figure.name) for run in self.results(cell)]
        known, unit = [each for each in found if each is not None], figure.whole or 1.0
        values = [unit * each.value for each in known]
        if len(known) == 1:
            return values, Estimate(*values, *(unit * end for end in known[0].interval or ()))
        return values, over_seeds(values, figure.whole) if values else None


def coverage(found: Findings) -> tuple[str, list[list[str]]]:
    """Seeds of each cell that are computed and asked for: a sentence, and a row for each cell.

    A cell without seeds, of the κ experiment, counts over its grid.
    """
    rows, whole, some = [], 0, 0
    for row in found.rows:
        if row.experiment == BANDIT:
            continue
        tuned = sum(each.row == row for each in found.tuning)
        done = sum(each.row == row for each in found.reported) if row.seeds else tuned
        asked = len(row.seeds) or len(row.coefficients()) * len(row.tuning_seeds)
        whole, some = whole + (done >= asked), some + (0 < done < asked)
        chosen = listed(found.chosen.get(row, {}))
        shown = f"{chosen} (of {tuned} runs)" if chosen else "–"
        configuration = ", ".join(filter(None, (row.configuration, listed(row.fields))))
        rows.append([*row.names(), configuration, shown, f"{done} of {asked}"])
    runs = len({each.name for each in (*found.reported, *found.tuning)})
    return (
        f"{whole} of {len(rows)} cells are computed whole, {some} in part; {runs} runs are "
        "finished, those that chose coefficients included.",
        rows,
    )
