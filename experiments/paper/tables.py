"""The paper's tables in its order, ours with its interval or its test beside the paper's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from experiments.paper.values import AVERAGE, PASS, Findings, whole_of
from flows.report.rows import p_text
from flows.report.statistics import Estimate, holm, welch
from flows.report.table import Cell, FittedTable

DIVERGENCES = ("KL", "Hellinger", "forward KL")
BASELINE = "f-DPO"
MISSING = "–"
_MAIN = ("main", "hard")

Names = tuple[str, str, str, str]
"""Experiment, setting, method and divergence of a cell."""


@dataclass(frozen=True)
class PaperFigure:
    """One figure of a table.

    Attributes:
        ours: Ours; a dash if it is not computed.
        interval: Its 95 % interval, and p-values if it is tested.
        paper: The paper's own figure; empty if it gives none.
    """

    ours: str = MISSING
    interval: str = ""
    paper: str = ""

    def __str__(self) -> str:
        own = f"{self.ours} {self.interval}".rstrip()
        return f"{own} (paper: {self.paper})" if self.paper else own


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper in one setting.

    Attributes:
        name: Name of its files.
        title: Number and title of the table.
        setting: The model or the task.
        note: What its figures are.
        header: Titles of the columns, the first that of the methods.
        rows: For each method its name and its figures.
    """

    name: str
    title: str
    setting: str
    note: str
    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[PaperFigure]]]

    @property
    def computed(self) -> bool:
        """True if this project computed at least one of the figures."""
        return any(each.ours != MISSING for _, row in self.rows for each in row)

    def plain(self) -> FittedTable:
        """The same for LaTeX and Markdown."""
        rows = [[method, *map(str, figures)] for method, figures in self.rows]
        title = f"{self.title}: {self.setting}"
        return FittedTable(title, self.header, rows, note=self.note, name=self.name)


def _mean(found: Findings, cell: Names, figure: str) -> PaperFigure:
    """The mean over seeds; under ``average`` the mean over the divergences."""
    if cell[3] == AVERAGE:
        each_mean = [found.over_seeds((*cell[:3], each), figure)[1] for each in DIVERGENCES]
        known = [each.value for each in each_mean if each is not None]
        if len(known) < len(DIVERGENCES):
            return PaperFigure()
        return PaperFigure(format(statistics.fmean(known), form_of(figure)))
    return _shown(found.over_seeds(cell, figure)[1], figure)


def _shown(estimate: Estimate | None, figure: str, sign: str = "") -> PaperFigure:
    if estimate is None:
        return PaperFigure()
    cell = Cell.of(estimate, f"{sign}{form_of(figure)}")
    return PaperFigure(cell.text, cell.interval)


def _spread(found: Findings, cell: Names, figure: str) -> PaperFigure:
    """Mean ± standard deviation over seeds; nothing of one seed."""
    values, _ = found.over_seeds(cell, figure)
    if len(values) < 2:
        return PaperFigure()
    form, mean, deviation = form_of(figure), statistics.fmean(values), statistics.stdev(values)
    return PaperFigure(f"{mean:{form}} ± {deviation:{form}} (n = {len(values)})")


def _tested(found: Findings, cell: Names, figure: str) -> PaperFigure:
    """Difference from f-DPO under the same divergence, p of Welch's test over seeds, p by Holm."""
    difference = against_baseline(found, cell, figure)
    if difference is None or difference.p_value is None:
        return PaperFigure()
    family: list[Names] = [
        (*cell[:2], method, divergence)
        for method in found.methods(cell[1], cell[0])
        for divergence in DIVERGENCES
        if method != BASELINE
    ]
    tests = [against_baseline(found, each, figure) for each in family]
    adjusted = dict(zip(family, holm([t.p_value if t else None for t in tests]), strict=True))
    shown = _shown(difference, figure, "+")
    p_values = f"{p_text(difference.p_value)}, by Holm {p_text(adjusted.get(cell))}"
    return replace(shown, interval=f"{shown.interval}, {p_values}")


def _bonus_on(found: Findings, cell: Names, figure: str) -> PaperFigure:
    """``WR, all`` is a figure of the experiment; ``WR, rejected only`` is the main table's."""
    name, _, responses = figure.partition(", ")
    own = cell if responses == "all" else ("main", *cell[1:])
    return _shown(found.over_seeds(own, name)[1], name)


_Columns = Callable[[Findings, str], list[tuple[str, str, str]]]


@dataclass(frozen=True)
class _Kind:
    """A table of the paper, whatever the setting.

    Attributes:
        name: Name in ``published.csv``.
        title: Number and title.
        note: What its figures are.
        experiments: Experiments whose cells it has.
        columns: Divergence, figure and title of each column, given all results and the setting.
        fill: What computes a figure of a cell.
        left_out: A method that it does not show.
    """

    name: str
    title: str
    note: str
    experiments: tuple[str, ...]
    columns: _Columns
    fill: Callable[[Findings, Names, str], PaperFigure] = _mean
    left_out: str = ""


def _of(divergences: Sequence[str], figures: Sequence[str]) -> _Columns:
    columns = [(each, figure, f"{each} {figure}") for each in divergences for figure in figures]
    return lambda found, setting: columns


def _hard_columns(found: Findings, setting: str) -> list[tuple[str, str, str]]:
    """Held-out prompts if pass@16 is asked of them, the runs' suites, and the paper's."""
    own = [each for each in found.reported if each.row.names()[:2] == ("hard", setting)]
    asked = any(16 in each.cell.config.evaluation.pass_at_k for each in own)
    figures = [PASS] if asked else []
    figures += [name for each in own for name in each.cell.config.suites]
    figures += [p.figure for p in found.published if (p.table, p.setting) == ("hard", setting)]
    return [("KL", figure, figure) for figure in dict.fromkeys(figures)]


def _tested_columns(found: Findings, setting: str) -> list[tuple[str, str, str]]:
    """Win rate and mean reward; on hard prompts pass@16 as well."""
    hard = _hard_columns(found, setting) if setting in found.settings("hard") else []
    return [*_of(DIVERGENCES, ("WR", "AvgR"))(found, setting), *hard]


_WITH_AVERAGE = (*DIVERGENCES, AVERAGE)
_KINDS = (
    _Kind(
        "in-domain",
        "Table 2 · In-domain evaluation",
        "WR: share of prompts, in percent, on which the policy's mean reward is above the "
        "base's; ties lose. AvgR: mean reward. Over seeds with Student's 95 % interval; of one "
        "seed with a bootstrap over prompts.",
        _MAIN,
        _of(_WITH_AVERAGE, ("WR", "AvgR")),
    ),
    _Kind(
        "out-of-domain",
        "Table 3 · Out-of-domain evaluation",
        "Alpaca: length-controlled win rate of AlpacaEval 2. Math: accuracy on MATH-500. Both "
        "in percent, of suites of the same names.",
        ("main",),
        _of(_WITH_AVERAGE, ("Alpaca", "Math")),
    ),
    _Kind(
        "distinct",
        "Table 4 · Distinct n-grams",
        "Share of different n-grams among all n-grams of the samples on held-out prompts, last "
        "iteration. The paper does not say of which of its models its figures are.",
        _MAIN,
        _of(("KL",), [f"dist-{n}" for n in range(1, 5)]),
    ),
    _Kind(
        "hard",
        "Table 5 · Hard prompts, pass@16",
        "Chance in percent that one of 16 samples is right, estimated without bias. "
        f"{PASS}: on held-out prompts; the others are suites.",
        ("hard",),
        _hard_columns,
    ),
    _Kind(
        "repeats",
        "Table 6 · Repeated runs",
        "Mean ± standard deviation over seeds.",
        _MAIN,
        _of(DIVERGENCES, ("WR", "AvgR")),
        _spread,
    ),
    _Kind(
        "p-values",
        f"Table 7 · p-values of the difference from {BASELINE}",
        "Difference of means over seeds with its 95 % interval, p of Welch's t test as it is, and "
        "by Holm over the methods and divergences of a setting, figure by figure: below 0.05 the "
        "difference is shown. A dash: fewer than two seeds, or no variation at all.",
        _MAIN,
        _tested_columns,
        _tested,
        left_out=BASELINE,
    ),
    _Kind(
        "coherence",
        "Table 8 · Coherence",
        "Mean of a judge's scores of the last iteration's responses, 0 (coherent) to 3 "
        "(nonsense), of a suite of that name.",
        ("main",),
        _of(DIVERGENCES, ("coherence",)),
    ),
    _Kind(
        "responses",
        "Table 9 · Responses that get the bonus",
        "All responses, or the rejected ones only (the runs of Table 2).",
        ("responses",),
        _of(
            DIVERGENCES,
            [f"{figure}, {on}" for figure in ("WR", "AvgR") for on in ("all", "rejected only")],
        ),
        _bonus_on,
    ),
)


def paper_tables(found: Findings) -> list[PaperTable]:
    """All tables in the paper's order; settings that are not run have its figures alone."""
    return [table for kind in _KINDS for table in _tables(found, kind)]


def _tables(found: Findings, kind: _Kind) -> list[PaperTable]:
    """A table for each setting, ours first, then those that only the paper has."""
    published = [each for each in found.published if each.table == kind.name]
    settings = [*found.settings(*kind.experiments), *(each.setting for each in published)]
    tables = [_table(found, kind, setting) for setting in dict.fromkeys(settings)]
    in_paper = {each.setting for each in published}
    return [each for each in tables if each.computed or each.setting in in_paper]


def _table(found: Findings, kind: _Kind, setting: str) -> PaperTable:
    in_paper = {
        (each.method, each.divergence, each.figure): str(each)
        for each in found.published
        if (each.table, each.setting) == (kind.name, setting)
    }
    cells = [
        row for row in found.rows if row.experiment in kind.experiments and row.setting == setting
    ]
    having = {row.experiment for row in cells}
    experiment = next((each for each in kind.experiments if each in having), kind.experiments[0])
    known = {row.divergence for row in cells} | {divergence for _, divergence, _ in in_paper}
    if len(known) >= len(DIVERGENCES):
        known.add(AVERAGE)
    columns = [each for each in kind.columns(found, setting) if each[0] in known]
    own = {row.method for row in cells}
    methods = dict.fromkeys([*(row.method for row in cells), *(method for method, *_ in in_paper)])
    rows = []
    for method in methods:
        figures = [
            replace(
                kind.fill(found, (experiment, setting, method, divergence), figure),
                paper=in_paper.get((method, divergence, figure), ""),
            )
            for divergence, figure, _ in columns
        ]
        shown = method in own or any(each != PaperFigure() for each in figures)
        if shown and method != kind.left_out:
            rows.append((method, figures))
    header = ["method", *(title for *_, title in columns)]
    return PaperTable(file_name(kind.name, setting), kind.title, setting, kind.note, header, rows)


def against_baseline(found: Findings, cell: Names, figure: str) -> Estimate | None:
    """A method's figure minus that of f-DPO under its divergence; None if one is missing."""
    experiment, setting, _, divergence = cell
    own, _ = found.over_seeds(cell, figure)
    base, _ = found.over_seeds((experiment, setting, BASELINE, divergence), figure)
    return welch(base, own, whole_of(figure)) if own and base else None


def form_of(figure: str) -> str:
    """Format of a figure by its name: as many decimals as the paper gives."""
    return ".4f" if figure == "AvgR" or figure.startswith("dist-") else ".2f"


def file_name(*words: str) -> str:
    """Name of a table's or figure's files, ``log-pi-ref-front-desk-geb-1-pi``: ASCII, no spaces."""
    text = "-".join(words).lower().replace("π", "pi")
    plain = "".join(each if each.isascii() and each.isalnum() else "-" for each in text)
    return "-".join(filter(None, plain.split("-")))
