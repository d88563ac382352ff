"""The paper's cells and their figures: ours over seeds, and the paper's own."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from experiments.study import Row, StudyRun, read_rows
from flows.pipeline.presets import configs_folder
from flows.report.prompt_figures import LENGTH_CONTROLLED
from flows.report.statistics import Estimate, over_seeds
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
# Figures by the paper's names: the suite, None for held-out prompts; the name; the largest share in
# the paper's unit, or None: only shares have one.
_FIGURES = {
    "WR": (None, "win_rate", _PERCENT),
    "AvgR": (None, "mean_reward", None),
    PASS: (None, PASS, _PERCENT),
    **{f"dist-{n}": (None, f"distinct_{n}", 1.0) for n in range(1, 5)},
    "Alpaca": ("alpaca_eval", LENGTH_CONTROLLED, _PERCENT),
    "Math": ("math500", "accuracy", _PERCENT),
    "coherence": ("coherence", "mean_reward", None),
}


def paper_rows(scale: str, only: Sequence[str] = ()) -> list[Row]:
    """The cells of a scale; see :func:`experiments.study.read_rows`.

    Raises:
        UserError: There is no such scale, or no cell has the names of ``only``.
    """
    if scale not in SCALES:
        raise UserError(f"there is no scale {scale!r}", f"one of: {', '.join(SCALES)}")
    return read_rows(configs_folder() / "paper" / "cells" / f"{scale}.csv", only, "paper")


def value_of(run: StudyRun, figure: str) -> Estimate | None:
    """A figure in the paper's unit, with its interval over prompts; None if it is not known.

    Args:
        run: A finished run.
        figure: ``WR`` (win rate, percent), ``AvgR``, ``dist-1`` … ``dist-4``, ``Alpaca``, ``Math``,
            ``coherence``, ``pass@16`` on held-out prompts, or the name of a suite for its pass@16
            (all percent).
    """
    suite, name, whole = _FIGURES.get(figure, (figure, PASS, _PERCENT))
    factor = whole or 1.0
    row = run.figures(suite)
    value = row.get(name, row.get("solved", {}).get(name))
    if value is None:
        return None
    low, high = row["intervals"].get(name) or (None, None)
    ends = (None if end is None else factor * end for end in (low, high))
    return Estimate(factor * value, *ends)


def whole_of(figure: str) -> float | None:
    """Upper bound of a figure in the paper's unit, 1 or 100; None if the figure has no bound."""
    return _FIGURES[figure][2] if figure in _FIGURES else _PERCENT


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

    def results(self, cell: tuple[str, str, str, str]) -> list[StudyRun]:
        """Finished runs of one cell, one for each seed; see :meth:`Row.names`."""
        return [each for each in self.reported if each.row.names() == cell]

    def over_seeds(
        self, cell: tuple[str, str, str, str], figure: str
    ) -> tuple[list[float], Estimate | None]:
        """A cell's figure: its value in each run, and their mean.

        Its interval is Student's over seeds; that over prompts if there is one run.
        """
        runs = self.results(cell)
        found = [each for each in (value_of(run, figure) for run in runs) if each is not None]
        values = [each.value for each in found]
        if len(found) == 1:
            return values, found[0]
        return values, over_seeds(values, whole_of(figure)) if values else None


def coverage(found: Findings) -> tuple[str, list[list[str]]]:
    """Seeds of each cell that are computed and asked for: a sentence, and a row for each cell.

    The κ experiment counts over its grid.
    """
    rows, whole, some = [], 0, 0
    for row in found.rows:
        if row.experiment == BANDIT:
            continue
        tuned = sum(each.row == row for each in found.tuning)
        done, asked = sum(each.row == row for each in found.reported), len(row.seeds)
        if row.experiment == KAPPA:
            done, asked = tuned, len(row.coefficients()) * len(row.tuning_seeds)
        whole, some = whole + (done >= asked), some + (0 < done < asked)
        chosen = found.chosen.get(row, {})
        coefficient = ", ".join(f"{name} = {value}" for name, value in chosen.items())
        shown = f"{coefficient} (of {tuned} runs)" if coefficient else "–"
        fields = ", ".join(f"{name}={value}" for name, value in row.fields.items())
        configuration = ", ".join(filter(None, (row.configuration, fields)))
        rows.append([*row.names(), configuration, shown, f"{done} of {asked}"])
    runs = len({each.name for each in (*found.reported, *found.tuning)})
    return (
        f"{whole} of {len(rows)} cells are computed whole, {some} in part; {runs} runs are "
        "finished, those that chose coefficients included.",
        rows,
    )
