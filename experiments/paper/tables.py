"""The paper's cells, figures and tables: our figures over seeds, and the paper's."""

import csv
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.paper.options import Judge
from experiments.study import Row, StudyRun, listed, read_rows
from flows.pipeline.loading import merged, read_sections
from flows.pipeline.presets import configs_folder
from flows.pipeline.strict_yaml import read_yaml
from flows.report.differences import p_text
from flows.report.statistics import holm, over_seeds, welch
from flows.report.table import Cell, FittedTable, figure_of
from stages.contract.params import Settings
from stages.evaluate.statistics import Estimate

BASELINE = "f-DPO"
TRAINING = "training"
JUDGED = {("main", "LLaMA-3-8B-SFT"): ("alpaca-eval", "coherence")}
"""Files of the suites that need a judge, by the experiment and setting that report them."""
DIVERGENCES = ("KL", "Hellinger", "forward KL")
PASS = "pass@16"
AVERAGE = "average"
"""In place of a divergence: the mean over all of them."""
Names = tuple[str, str, str, str]
"""Experiment, setting, method and divergence of a cell."""
Published = dict[tuple[str, str], dict[tuple[str, str, str], str]]


class Figure(NamedTuple):
    """A figure of the paper and its place in a run."""

    suite: str | None
    """Suite that it is measured on; None for held-out prompts, ``TRAINING`` for the responses that
    the last iteration sampled for training."""
    name: str
    """Its name in ``metrics.json``."""
    whole: float | None = 100.0
    """The largest share in the paper's unit, 1 or 100; None for any other figure."""
    form: str = ".2f"
    """Format with as many decimals as the paper gives."""


_FIGURES = {
    "WR": Figure(None, "win_rate"),
    "AvgR": Figure(None, "mean_reward", None, ".4f"),
    PASS: Figure(None, PASS),
    **{f"dist-{n}": Figure(TRAINING, f"distinct_{n}", 1.0, ".4f") for n in range(1, 5)},
    **{f"held-out dist-{n}": Figure(None, f"distinct_{n}", 1.0, ".4f") for n in range(1, 5)},
    "Alpaca": Figure("alpaca_eval", "length_controlled_win_rate"),
    "Math": Figure("math500", "accuracy"),
    "coherence": Figure("coherence", "mean_reward", None),
}


def paper_rows(scale: str, only: Sequence[str] = (), judge: Judge | None = None) -> list[Row]:
    """The cells of a scale; ``only`` as in :func:`experiments.study.read_rows`.

    Without a judge the suites in ``JUDGED`` are not run.
    """
    rows = read_rows(configs_folder() / "paper" / "cells" / f"{scale}.csv", only, "paper")
    return [row if judge is None else _judged(row, judge) for row in rows]


def _judged(row: Row, judge: Judge) -> Row:
    sections: dict[str, Any] = {}
    for name in JUDGED.get((row.experiment, row.setting), ()):
        file = read_sections(configs_folder() / "suites" / f"{name}.yaml")
        for suite in file["suites"].values():
            suite["score"]["judge"] |= judge.model_dump(exclude_none=True)
        sections = merged(sections, file)
    return replace(row, sections=sections)


def published() -> Published:
    """The paper's figures as it prints them, ``74.26 ± 2.01``.

    They are by table and setting, and there by method, divergence and figure.
    """
    figures: Published = {}
    place = configs_folder() / "paper" / "cells" / "published.csv"
    with place.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            table = figures.setdefault((row["table"], row["setting"]), {})
            value = " ± ".join(filter(None, (row["value"], row["deviation"])))
            table[row["method"], row["divergence"], row["figure"]] = value
    return figures


@dataclass(frozen=True)
class Findings:
    """Everything that the report is made of."""

    scale: str
    rows: Sequence[Row]
    """All cells of the scale."""
    reported: Sequence[StudyRun]
    tuning: Sequence[StudyRun]
    """Finished runs by which coefficients were chosen, and the runs of the κ experiment."""
    chosen: Mapping[Row, Mapping[str, Any]]
    failed: Mapping[str, str]
    """Errors by the names of runs that failed."""
    caution: str = ""
    """Warning that a reader has to know first; empty if there is none."""

    def results(self, cell: Names) -> list[StudyRun]:
        """Finished runs of one cell, one for each seed."""
        return [run for run in self.reported if run.row.names() == cell]

    def over_seeds(self, cell: Names, figure: Figure) -> tuple[list[float], Estimate | None]:
        """A cell's figure in the paper's unit: its value in each run, and their mean.

        Its interval is Student's over seeds; that over prompts if there is one run.
        """
        unit = figure.whole or 1.0
        estimates: list[Estimate] = []
        for run in self.results(cell):
            figures = run.training_figures
            if figure.suite != TRAINING:
                figures = run.figures(figure.suite)
            estimate = figure_of(figures, figure.name)
            if estimate is not None:
                ends = [unit * end for end in estimate.interval or ()]
                estimates.append(Estimate(unit * estimate.value, *ends))
        values = [estimate.value for estimate in estimates]
        if len(values) < 2:
            return values, estimates[0] if estimates else None
        return values, over_seeds(values, figure.whole)


@dataclass(frozen=True)
class PaperFigure(Cell):
    """One figure of a table: ours as in any cell, a dash if it is not computed."""

    paper: str = ""
    """The paper's own figure; empty if it gives none."""

    def __str__(self) -> str:
        return f"{super().__str__()} (paper: {self.paper})" if self.paper else super().__str__()


MISSING = PaperFigure("–")


@dataclass
class PaperTable(FittedTable):
    """One table of the paper in one setting: a method in each row, then its figures."""

    setting: str = ""
    """The model or the task."""
    name: str = ""
    """Beginning of its part's files."""

    def figures(self) -> dict[str, list[PaperFigure]]:
        """The figures of each method, a column each."""
        return {
            str(method): [cell for cell in row if isinstance(cell, PaperFigure)]
            for method, *row in self.rows
        }

    @property
    def computed(self) -> bool:
        """True if this project computed at least one of the figures."""
        return any(cell.text != MISSING.text for row in self.figures().values() for cell in row)


def _mean(found: Findings, cell: Names, figure: Figure) -> PaperFigure:
    """The mean over seeds; under ``average`` the mean over the divergences."""
    if cell[3] != AVERAGE:
        return _shown(found.over_seeds(cell, figure)[1], figure.form)
    cells = [(*cell[:3], divergence) for divergence in DIVERGENCES]
    return _average(found, cells, figure)


def _average(found: Findings, cells: Sequence[Names], *figures: Figure) -> PaperFigure:
    """The mean of figures over cells, without an interval; a dash if one of them lacks."""
    values: list[float] = []
    for cell in cells:
        for figure in figures:
            estimate = found.over_seeds(cell, figure)[1]
            if estimate is None:
                return MISSING
            values.append(estimate.value)
    return _shown(Estimate(statistics.fmean(values)), figures[0].form)


def _spread(found: Findings, cell: Names, figure: Figure) -> PaperFigure:
    """Mean ± standard deviation over seeds; nothing of one seed."""
    values = found.over_seeds(cell, figure)[0]
    form = figure.form
    if len(values) < 2:
        return MISSING
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values)
    return PaperFigure(f"{mean:{form}} ± {deviation:{form}} (n = {len(values)})")


def _test(found: Findings, cell: Names, figure: Figure) -> PaperFigure:
    """Difference from f-DPO under the same divergence, p of Welch's test over seeds, p by Holm."""
    tests: dict[Names, Estimate] = {}
    for row in found.rows:
        if row.names()[:2] == cell[:2] and row.method != BASELINE:
            values, _ = found.over_seeds(row.names(), figure)
            base, _ = found.over_seeds((*cell[:2], BASELINE, row.divergence), figure)
            if values and base:
                tests[row.names()] = welch(base, values, figure.whole)
    adjusted = dict(zip(tests, holm([test.p_value for test in tests.values()]), strict=True))
    difference = tests.get(cell)
    if difference is None or difference.p_value is None:
        return MISSING
    shown = _shown(difference, f"+{figure.form}")
    p_values = f"{p_text(difference.p_value)}, by Holm {p_text(adjusted[cell])}"
    return replace(shown, interval=f"{shown.interval}, {p_values}")


def _shown(estimate: Estimate | None, form: str) -> PaperFigure:
    return MISSING if estimate is None else PaperFigure.of(estimate, form)


_SHOWN = {"mean": _mean, "spread": _spread, "test": _test}


class Part(Settings):
    """A table of the paper, whatever the setting, or a figure, which has no columns."""

    name: str
    """Name in ``published.csv``, with which the names of its files begin."""
    title: str
    """Number and title."""
    note: str = ""
    """Meaning of its figures, shown below it."""
    experiments: tuple[str, ...] = ()
    """Experiments whose cells it has."""
    divergences: tuple[str, ...] = DIVERGENCES
    """Divergences, and ``average``."""
    figures: tuple[str, ...] = ()
    """Its figures under each divergence."""
    pass_at_16: bool = False
    """True if a column with pass@16 of hard prompts is added."""
    shows: Literal["mean", "spread", "test"] = "mean"
    """Statistic over seeds: the mean, mean ± deviation, or the difference from f-DPO."""


_WRITTEN = read_yaml(Path(__file__).with_name("parts.yaml"))
PARTS = [Part.model_validate(part) for part in _WRITTEN]
"""The paper's tables and figures, in its order."""


def paper_tables(found: Findings) -> list[PaperTable]:
    """All tables in the paper's order; settings that are not run have its figures alone."""
    given = published()
    tables: list[PaperTable] = []
    for part in PARTS:
        settings = [row.setting for row in found.rows if row.experiment in part.experiments]
        settings += [setting for table, setting in given if table == part.name]
        for setting in dict.fromkeys(settings):
            table = _table(found, part, setting, given)
            if table.computed or (part.name, setting) in given:
                tables.append(table)
    return tables


def _table(found: Findings, part: Part, setting: str, given: Published) -> PaperTable:
    paper = given.get((part.name, setting), {})
    rows = [
        row for row in found.rows if row.experiment in part.experiments and row.setting == setting
    ]
    # All cells of a setting are of one experiment: a hard setting has no cell in `main`.
    experiment = rows[0].experiment if rows else ""
    divergences = {row.divergence for row in rows} | {divergence for _, divergence, _ in paper}
    if divergences.issuperset(DIVERGENCES):
        divergences.add(AVERAGE)
    solved = _solved(found, setting, given) if part.pass_at_16 else []
    benchmarks = [Figure(title, PASS) for title in solved if title not in (PASS, AVERAGE)]
    columns: dict[str, tuple[str, str]] = {}
    for divergence in part.divergences:
        if divergence in divergences:
            for title in part.figures:
                columns[f"{divergence} {title}"] = (divergence, title)
    for title in solved:
        # An average has no test.
        if title != AVERAGE or part.shows == "mean":
            columns[title] = ("KL", title)

    def figure_in(method: str, divergence: str, title: str) -> PaperFigure:
        name, _, responses = title.partition(", ")
        # The runs with the bonus on rejected responses are the main table's.
        table = "main" if responses == "rejected only" else experiment
        cell = table, setting, method, divergence
        if title == AVERAGE:
            figure = _average(found, [cell], *benchmarks)
        else:
            # Any other title is a suite, for its pass@16.
            figure = _SHOWN[part.shows](found, cell, _FIGURES.get(name, Figure(name, PASS)))
        return replace(figure, paper=paper.get((method, divergence, title), ""))

    methods = dict.fromkeys([*(row.method for row in rows), *(method for method, *_ in paper)])
    if part.shows == "test":
        methods.pop(BASELINE, None)
    return PaperTable(
        f"{part.title}: {setting}",
        ["method", *columns],
        [
            [method, *(figure_in(method, *place) for place in columns.values())]
            for method in methods
        ],
        note=part.note,
        name=file_name(part.name, setting),
        setting=setting,
    )


def _solved(found: Findings, setting: str, given: Published) -> list[str]:
    """Held-out prompts if pass@16 is asked of them, the runs' suites, and the paper's."""
    titles: list[str] = []
    for run in found.reported:
        if run.row.names()[:2] == ("hard", setting):
            config = run.cell.config
            titles += [PASS] if 16 in config.evaluation.pass_at_k else []
            titles += config.suites
    titles += [figure for _, _, figure in given.get(("hard", setting), {})]
    return list(dict.fromkeys(titles))


def file_name(*words: str) -> str:
    """Name of a table's or figure's files, ``log-pi-ref-front-desk-geb-1-pi``: ASCII, no spaces."""
    text = "-".join(words).lower().replace("π", "pi")
    return re.sub("[^a-z0-9]+", "-", text).strip("-")


def coverage(found: Findings) -> tuple[str, list[list[str]]]:
    """Seeds of each cell that are computed and asked for: a sentence, and a row for each cell.

    A cell without seeds, of the κ experiment, counts over its grid.
    """
    rows = []
    whole = 0
    some = 0
    reported = Counter(run.row for run in found.reported)
    tuning = Counter(run.row for run in found.tuning)
    for row in found.rows:
        done = reported[row] if row.seeds else tuning[row]
        planned = len(row.seeds) or len(row.coefficients()) * len(row.tuning_seeds)
        whole += done >= planned
        some += 0 < done < planned
        chosen = listed(found.chosen.get(row, {}))
        shown = f"{chosen} (of {tuning[row]} runs)" if chosen else "–"
        configuration = ", ".join(filter(None, (row.configuration, listed(row.fields))))
        rows.append([*row.names(), configuration, shown, f"{done} of {planned}"])
    runs = len({run.name for run in (*found.reported, *found.tuning)})
    return (
        f"{whole} of {len(rows)} cells are computed whole, {some} in part; {runs} runs are "
        "finished, with the runs that chose coefficients.",
        rows,
    )
