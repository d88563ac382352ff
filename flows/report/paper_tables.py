"""The paper's tables in its order, ours beside its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flows.report.between import p_text
from flows.report.comparison_tables import TextTable
from flows.report.paper_values import AVERAGE, PASS, Findings
from flows.report.statistics import Difference, Estimate, holm, welch
from flows.report.table import Cell

DIVERGENCES = ("KL", "Hellinger", "forward KL")
BASELINE = "f-DPO"
_FORMS = {"WR": ".2f", "AvgR": ".4f", "coherence": ".2f"}
_MISSING = "–"


@dataclass(frozen=True)
class PaperFigure:
    """One figure of a table.

    Attributes:
        text: Ours; a dash where it is not computed.
        interval: Its 95 % interval.
        paper: The paper's own figure; empty where it gives none.
    """

    text: str = _MISSING
    interval: str = ""
    paper: str = ""

    def __str__(self) -> str:
        own = f"{self.text} {self.interval}".rstrip()
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
        computed: Whether any figure of it is ours.
    """

    name: str
    title: str
    setting: str
    note: str
    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[PaperFigure]]] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """Whether any figure in it is ours."""
        return any(each.text != _MISSING for _, row in self.rows for each in row)

    def plain(self) -> TextTable:
        """The same for LaTeX and Markdown."""
        rows = [[method, *map(str, figures)] for method, figures in self.rows]
        return TextTable(self.name, f"{self.title}: {self.setting}", self.note, self.header, rows)


@dataclass(frozen=True)
class _Place:
    """One figure of one cell."""

    table: str
    setting: str
    method: str
    divergence: str
    figure: str
    experiment: str


_Fill = Callable[[Findings, _Place], PaperFigure]


def paper_tables(found: Findings) -> list[PaperTable]:
    """All tables in the paper's order; settings that are not run have its figures alone."""
    return [
        *_table(
            found,
            "in-domain",
            "Table 2 · In-domain evaluation",
            "WR: share of prompts, in percent, on which the policy's mean reward is above the "
            "base's; ties lose. AvgR: mean reward. Over seeds with Student's 95 % interval; of one "
            "seed with a bootstrap over prompts.",
            ("main", "hard"),
            _columns(("WR", "AvgR")),
            _mean,
        ),
        *_table(
            found,
            "out-of-domain",
            "Table 3 · Out-of-domain evaluation",
            "Alpaca: length-controlled win rate of AlpacaEval 2. Math: accuracy on MATH-500. Both "
            "in percent, of suites of the same names.",
            ("main",),
            _columns(("Alpaca", "Math")),
            _mean,
        ),
        *_table(
            found,
            "distinct",
            "Table 4 · Distinct n-grams",
            "Share of different n-grams among all n-grams of the samples on held-out prompts, last "
            "iteration. The paper does not say of which of its models its figures are.",
            ("main", "hard"),
            [("KL", f"dist-{n}") for n in range(1, 5)],
            _mean,
        ),
        *_hard(found),
        *_table(
            found,
            "repeats",
            "Table 6 · Repeated runs",
            "Mean ± standard deviation over seeds.",
            ("main", "hard"),
            _columns(("WR", "AvgR"))[: 2 * len(DIVERGENCES)],
            _spread,
        ),
        *_p_values(found),
        *_table(
            found,
            "coherence",
            "Table 8 · Coherence",
            "Mean of a judge's scores of the last iteration's responses, 0 (coherent) to 3 "
            "(nonsense), of a suite of that name.",
            ("main",),
            [(each, "coherence") for each in DIVERGENCES],
            _mean,
        ),
        *_responses(found),
    ]


def _columns(figures: Iterable[str]) -> list[tuple[str, str]]:
    return [(each, figure) for each in (*DIVERGENCES, AVERAGE) for figure in figures]


def _table(
    found: Findings,
    name: str,
    title: str,
    note: str,
    experiments: Sequence[str],
    columns: Sequence[tuple[str, str]],
    fill: _Fill,
) -> list[PaperTable]:
    """A table for each setting, ours first, then those that only the paper has."""
    in_paper = [each for each in found.published if each.table == name]
    settings = [*found.settings(*experiments), *(each.setting for each in in_paper)]
    tables = []
    for setting in dict.fromkeys(settings):
        experiment = _experiment(found, setting, experiments)
        own = found.methods(setting, *experiments)
        published = [each.method for each in in_paper if each.setting == setting]
        shown = [each for each in columns if _has(found, setting, each[0], experiments, name)]
        rows = []
        for method in dict.fromkeys([*own, *published]):
            places = [_Place(name, setting, method, *each, experiment) for each in shown]
            figures = [fill(found, place) for place in places]
            if any(each.text != _MISSING or each.paper for each in figures) or method in own:
                rows.append((method, figures))
        header = ["method", *(f"{divergence} {figure}" for divergence, figure in shown)]
        table = PaperTable(_slug(name, setting), title, setting, note, header, rows)
        if table.computed or published:
            tables.append(table)
    return tables


def _experiment(found: Findings, setting: str, experiments: Sequence[str]) -> str:
    for each in experiments:
        if setting in found.settings(each):
            return each
    return experiments[0]


def _has(
    found: Findings, setting: str, divergence: str, experiments: Sequence[str], table: str
) -> bool:
    """Whether a setting has cells, or the paper figures, under a divergence."""
    cells = [row for row in found.rows if row.experiment in experiments and row.setting == setting]
    known = {row.divergence for row in cells}
    known |= {
        each.divergence
        for each in found.published
        if (each.table, each.setting) == (table, setting)
    }
    return divergence in known or (divergence == AVERAGE and len(known) >= len(DIVERGENCES))


def _mean(found: Findings, place: _Place) -> PaperFigure:
    """The mean over seeds; under ``average`` the mean over the divergences."""
    paper = _paper(found, place)
    if place.divergence == AVERAGE:
        means = [_over_seeds(found, place, each)[1] for each in DIVERGENCES]
        known = [each.value for each in means if each is not None]
        if len(known) < len(DIVERGENCES):
            return PaperFigure(paper=paper)
        return PaperFigure(format(statistics.fmean(known), _form(place.figure)), paper=paper)
    return _shown(_over_seeds(found, place)[1], place.figure, paper)


def _spread(found: Findings, place: _Place) -> PaperFigure:
    values, _ = _over_seeds(found, place)
    form, paper = _form(place.figure), _paper(found, place)
    if len(values) < 2:
        return PaperFigure(paper=paper)
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return PaperFigure(f"{mean:{form}} ± {deviation:{form}} (n = {len(values)})", paper=paper)


def _over_seeds(
    found: Findings, place: _Place, divergence: str | None = None
) -> tuple[list[float], Estimate | None]:
    where = place.experiment, place.setting, place.method, divergence or place.divergence
    return found.over_seeds(*where, place.figure)


def _shown(estimate: Estimate | None, figure: str, paper: str) -> PaperFigure:
    if estimate is None:
        return PaperFigure(paper=paper)
    cell = Cell.of(estimate, _form(figure))
    return PaperFigure(cell.text, cell.interval, paper)


def _paper(found: Findings, place: _Place) -> str:
    at = place.table, place.setting, place.method, place.divergence, place.figure
    return found.in_paper(*at)


def _form(figure: str) -> str:
    return _FORMS.get(figure, ".4f" if figure.startswith("dist-") else ".2f")


def _hard(found: Findings) -> list[PaperTable]:
    """pass@16 on each suite of the experiment, and on held-out prompts where it is asked for."""
    title = "Table 5 · Hard prompts, pass@16"
    note = (
        "Chance in percent that one of 16 samples is right, estimated without bias. "
        f"{PASS}: on held-out prompts; the others are suites."
    )
    tables = []
    settings = dict.fromkeys(
        [*found.settings("hard"), *(p.setting for p in found.published if p.table == "hard")]
    )
    for setting in settings:
        own = [each for each in found.reported if each.run.row.experiment == "hard"]
        suites = [name for each in own for name in each.run.cell.config.suites]
        asked = any(16 in each.run.cell.config.evaluation.pass_at_k for each in own)
        in_paper = [p for p in found.published if (p.table, p.setting) == ("hard", setting)]
        figures = [PASS] if asked and setting in found.settings("hard") else []
        figures += [*suites, *(p.figure for p in in_paper)]
        methods = [*found.methods(setting, "hard"), *(p.method for p in in_paper)]
        columns = list(dict.fromkeys(figures))
        rows = [
            (
                method,
                [
                    _mean(found, _Place("hard", setting, method, "KL", figure, "hard"))
                    for figure in columns
                ],
            )
            for method in dict.fromkeys(methods)
        ]
        header = ["method", *columns]
        if columns:
            tables.append(PaperTable(_slug("hard", setting), title, setting, note, header, rows))
    return tables


def _p_values(found: Findings) -> list[PaperTable]:
    """Welch's test of every method against f-DPO; adjusted within a setting and a figure."""

    def fill(found: Findings, place: _Place) -> PaperFigure:
        return _tested(found, place)

    title = f"Table 7 · p-values of the difference from {BASELINE}"
    note = (
        "Difference of means over seeds, and p of Welch's t test, as it is; those by Holm stand "
        "under what was found. A dash: fewer than two seeds, or no variation at all."
    )
    experiments = ("main", "hard")
    columns = _columns(("WR", "AvgR"))[: 2 * len(DIVERGENCES)]
    tables = _table(found, "p-values", title, note, experiments, columns, fill)
    return [
        PaperTable(
            *(each.name, each.title, each.setting, each.note, each.header),
            [row for row in each.rows if row[0] != BASELINE],
        )
        for each in tables
    ]


def _tested(found: Findings, place: _Place) -> PaperFigure:
    difference = against_baseline(
        *(found, place.experiment, place.setting, place.method, place.divergence, place.figure)
    )
    paper = _paper(found, place)
    if difference is None or difference.p_value is None:
        return PaperFigure(paper=paper)
    value = format(difference.estimate.value, f"+{_form(place.figure)}")
    return PaperFigure(f"{value}, {p_text(difference.p_value)}", paper=paper)


def against_baseline(
    found: Findings, experiment: str, setting: str, method: str, divergence: str, figure: str
) -> Difference | None:
    """A method's figure minus that of f-DPO under its divergence; None where one is missing."""
    own, _ = found.over_seeds(experiment, setting, method, divergence, figure)
    base, _ = found.over_seeds(experiment, setting, BASELINE, divergence, figure)
    return welch(base, own) if own and base else None


def _responses(found: Findings) -> list[PaperTable]:
    """Bonus on all responses beside that on rejected ones, which are cells of the main table."""

    def fill(found: Findings, place: _Place) -> PaperFigure:
        figure, _, on = place.figure.partition(", ")
        experiment = "responses" if on == "all" else "main"
        own = _Place(place.table, place.setting, place.method, place.divergence, figure, experiment)
        return _shown(_over_seeds(found, own)[1], figure, _paper(found, place))

    return _table(
        found,
        "responses",
        "Table 9 · Responses that get the bonus",
        "All responses, or the rejected ones only (the runs of Table 2).",
        ("responses",),
        [
            (each, f"{figure}, {on}")
            for each in DIVERGENCES
            for figure in ("WR", "AvgR")
            for on in ("all", "rejected only")
        ],
        fill,
    )


def _slug(name: str, setting: str) -> str:
    plain = "".join(each if each.isalnum() else "-" for each in f"{name}-{setting}".lower())
    return "-".join(filter(None, plain.split("-")))


def statements(found: Findings) -> list[str]:
    """What holds and what does not: every method against f-DPO, in each setting.

    Tested is the mean reward, on hard prompts pass@16 as well; p-values are by Holm over the
    methods and divergences of a setting, figure by figure.
    """
    lines = []
    for experiment in ("main", "hard"):
        for setting in found.settings(experiment):
            for figure in ("AvgR", *_pass_figures(found, experiment, setting)):
                lines += _statements(found, experiment, setting, figure)
    return lines


def _pass_figures(found: Findings, experiment: str, setting: str) -> list[str]:
    if experiment != "hard":
        return []
    own = [each for each in found.reported if each.run.row.setting == setting]
    suites = dict.fromkeys(name for each in own for name in each.run.cell.config.suites)
    return [PASS, *suites]


def _statements(found: Findings, experiment: str, setting: str, figure: str) -> list[str]:
    tested = []
    for method in found.methods(setting, experiment):
        for divergence in DIVERGENCES if method != BASELINE else ():
            at = experiment, setting, method, divergence
            difference = against_baseline(found, *at, figure)
            if difference is not None:
                seeds = [
                    len(found.results(experiment, setting, each, divergence))
                    for each in (method, BASELINE)
                ]
                tested.append((method, divergence, difference, seeds))
    adjusted = holm([difference.p_value for _, _, difference, _ in tested])
    return [
        _statement(setting, divergence, method, figure, difference, p_value, seeds)
        for (method, divergence, difference, seeds), p_value in zip(tested, adjusted, strict=True)
    ]


def _statement(
    setting: str,
    divergence: str,
    method: str,
    figure: str,
    difference: Difference,
    p_value: float | None,
    seeds: Sequence[int],
) -> str:
    verdict = "no difference shown"
    if p_value is not None and p_value < 0.05:
        verdict = "above" if difference.estimate.value > 0 else "below"
    form = f"+{_form(figure)}"
    own = Cell.of(difference.estimate, form)
    place = f"{setting}, {divergence}, {figure}: {method} − {BASELINE} = {own}"
    test = f"{p_text(p_value)} (Welch, Holm; {seeds[0]} and {seeds[1]} seeds)"
    return f"{place}, {test}: {verdict}"
