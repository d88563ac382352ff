"""The paper's cells, figures and tables: our figures over seeds, and the paper's."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.paper.options import Judge, Kappa
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


def paper_rows(
    scale: str, only: Sequence[str] = (), kappa: Kappa = "grid", judge: Judge | None = None
) -> list[Row]:
    """The cells of a scale; ``only`` as in :func:`experiments.study.read_rows`.

    The κ ``ratio`` leaves reported cells the κ or ``target_ratio`` of their presets. Without a
    judge the suites in ``JUDGED`` are not run.
    """
    rows = read_rows(configs_folder() / "paper" / "cells" / f"{scale}.csv", only, "paper")
    if kappa == "ratio":
        rows = [_without_search(each) for each in rows]
    return [row if judge is None else _judged(row, judge) for row in rows]


def _without_search(row: Row) -> Row:
    if not row.seeds or list(row.grid) != ["train.kappa"]:
        return row
    fields = {name: value for name, value in row.fields.items() if name != "train.target_ratio"}
    return replace(row, fields=fields, grid={}, tuning_seeds=())


def _judged(row: Row, judge: Judge) -> Row:
    if row.names()[:2] not in JUDGED:
        return row
    sections: dict[str, Any] = {}
    for suite in JUDGED[row.names()[:2]]:
        read = read_sections(configs_folder() / "suites" / f"{suite}.yaml")
        for each in read["suites"].values():
            each["score"]["judge"] |= judge.model_dump(exclude_none=True)
        sections = merged(sections, read)
    return replace(row, sections=sections)


def published() -> Published:
    """The paper's figures as it prints them, ``74.26 ± 2.01``.

    They are by table and setting, and there by method, divergence and figure.
    """
    found: Published = {}
    place = configs_folder() / "paper" / "cells" / "published.csv"
    with place.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            table = found.setdefault((row["table"], row["setting"]), {})
            value = " ± ".join(filter(None, (row["value"], row["deviation"])))
            table[row["method"], row["divergence"], row["figure"]] = value
    return found


@dataclass(frozen=True)
class Findings:
    """Everything that the report is made of."""

    scale: str
    rows: Sequence[Row]
    """All cells of the scale."""
    reported: Sequence[StudyRun]
    tuning: Sequence[StudyRun]
    """Finished runs by which coefficients were chosen, and those of the κ experiment."""
    chosen: Mapping[Row, Mapping[str, Any]]
    failed: Mapping[str, str]
    """Errors by the names of runs that failed."""
    caution: str = ""
    """Warning that a reader has to know first; empty if there is none."""

    def results(self, cell: Names) -> list[StudyRun]:
        """Finished runs of one cell, one for each seed."""
        return [each for each in self.reported if each.row.names() == cell]

    def over_seeds(self, cell: Names, figure: Figure) -> tuple[list[float], Estimate | None]:
        """A cell's figure in the paper's unit: its value in each run, and their mean.

        Its interval is Student's over seeds; that over prompts if there is one run.
        """
        found = [
            figure_of(
                run.training_figures if figure.suite == TRAINING else run.figures(figure.suite),
                figure.name,
            )
            for run in self.results(cell)
        ]
        known = [each for each in found if each is not None]
        unit = figure.whole or 1.0
        values = [unit * each.value for each in known]
        if len(known) == 1:
            return values, Estimate(*values, *(unit * end for end in known[0].interval or ()))
        return values, over_seeds(values, figure.whole) if values else None


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
            str(method): [each for each in row if isinstance(each, PaperFigure)]
            for method, *row in self.rows
        }

    @property
    def computed(self) -> bool:
        """True if this project computed at least one of the figures."""
        return any(each.text != MISSING.text for row in self.figures().values() for each in row)


def _mean(found: Findings, cell: Names, figure: Figure) -> PaperFigure:
    """The mean over seeds; under ``average`` the mean over the divergences."""
    if cell[3] != AVERAGE:
        return _shown(found.over_seeds(cell, figure)[1], figure.form)
    means = [found.over_seeds((*cell[:3], each), figure)[1] for each in DIVERGENCES]
    return _shown(_mean_of_all(means), figure.form)


def _mean_of_all(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """The mean without an interval; None where one of the estimates lacks."""
    known = [estimate.value for estimate in estimates if estimate is not None]
    return Estimate(statistics.fmean(known)) if len(known) == len(estimates) else None


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
            own, _ = found.over_seeds(row.names(), figure)
            base, _ = found.over_seeds((*cell[:2], BASELINE, row.divergence), figure)
            if own and base:
                tests[row.names()] = welch(base, own, figure.whole)
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
PARTS = [Part.model_validate(each) for each in _WRITTEN]
"""The paper's tables and figures, in its order."""


def paper_tables(found: Findings) -> list[PaperTable]:
    """All tables in the paper's order; settings that are not run have its figures alone."""
    given = published()
    tables = list[PaperTable]()
    for part in PARTS:
        settings = [row.setting for row in found.rows if row.experiment in part.experiments]
        settings += [setting for table, setting in given if table == part.name]
        made = [_table(found, part, each, given) for each in dict.fromkeys(settings)]
        tables += [each for each in made if each.computed or (part.name, each.setting) in given]
    return tables


def _table(found: Findings, part: Part, setting: str, given: Published) -> PaperTable:
    paper = given.get((part.name, setting), {})
    names = [row.names() for row in found.rows]
    names = [each for each in names if each[0] in part.experiments and each[1] == setting]
    # All cells of a setting are of one experiment: a hard setting has no cell in `main`.
    experiment = names[0][0] if names else ""
    divergences = {each[3] for each in names} | {divergence for _, divergence, _ in paper}
    if divergences.issuperset(DIVERGENCES):
        divergences.add(AVERAGE)
    shown = [each for each in part.divergences if each in divergences]
    columns = [(each, figure, f"{each} {figure}") for each in shown for figure in part.figures]
    solved = _solved(found, setting, given) if part.pass_at_16 else []
    benchmarks = [each for each in solved if each not in (PASS, AVERAGE)]
    # An average has no test.
    solved = [each for each in solved if each != AVERAGE or part.shows == "mean"]
    columns += [("KL", each, each) for each in solved]

    def figure_in(method: str, divergence: str, title: str) -> PaperFigure:
        name, _, responses = title.partition(", ")
        # The runs with the bonus on rejected responses are the main table's.
        own = "main" if responses == "rejected only" else experiment
        cell = own, setting, method, divergence
        # Any other title is a suite, for its pass@16.
        asked = _FIGURES.get(name, Figure(name, PASS))
        if part.pass_at_16 and title == AVERAGE:
            means = [found.over_seeds(cell, Figure(benchmark, PASS))[1] for benchmark in benchmarks]
            figure = _shown(_mean_of_all(means), asked.form)
        else:
            figure = _SHOWN[part.shows](found, cell, asked)
        return replace(figure, paper=paper.get((method, divergence, title), ""))

    methods = dict.fromkeys([*(each[2] for each in names), *(method for method, *_ in paper)])
    if part.shows == "test":
        methods.pop(BASELINE, None)
    return PaperTable(
        f"{part.title}: {setting}",
        ["method", *(title for *_, title in columns)],
        [[each, *(figure_in(each, *column[:2]) for column in columns)] for each in methods],
        note=part.note,
        name=file_name(part.name, setting),
        setting=setting,
    )


def _solved(found: Findings, setting: str, given: Published) -> list[str]:
    """Held-out prompts if pass@16 is asked of them, the runs' suites, and the paper's."""
    own = [each.cell.config for each in found.reported if each.row.names()[:2] == ("hard", setting)]
    titles = [PASS] if any(16 in each.evaluation.pass_at_k for each in own) else []
    titles += [name for each in own for name in each.suites]
    titles += [figure for _, _, figure in given.get(("hard", setting), {})]
    return list(dict.fromkeys(titles))


def file_name(*words: str) -> str:
    """Name of a table's or figure's files, ``log-pi-ref-front-desk-geb-1-pi``: ASCII, no spaces."""
    text = "-".join(words).lower().replace("π", "pi")
    plain = "".join(each if each.isascii() and each.isalnum() else "-" for each in text)
    return "-".join(filter(None, plain.split("-")))


def coverage(found: Findings) -> tuple[str, list[list[str]]]:
    """Seeds of each cell that are computed and asked for: a sentence, and a row for each cell.

    A cell without seeds, of the κ experiment, counts over its grid.
    """
    rows = []
    whole = 0
    some = 0
    for row in found.rows:
        tuned = sum(each.row == row for each in found.tuning)
        done = sum(each.row == row for each in found.reported) if row.seeds else tuned
        asked = len(row.seeds) or len(row.coefficients()) * len(row.tuning_seeds)
        whole = whole + (done >= asked)
        some = some + (0 < done < asked)
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
