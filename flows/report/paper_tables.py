"""The paper's tables in its order, ours beside its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flows.report.paper_figures import (
    BASELINE,
    DIVERGENCES,
    MISSING,
    PaperFigure,
    PaperTable,
    Place,
    file_name,
    mean_figure,
    shown_figure,
    spread_figure,
    tested_figure,
)
from flows.report.paper_values import AVERAGE, PASS, Findings

_Fill = Callable[[Findings, Place], PaperFigure]


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
            mean_figure,
        ),
        *_table(
            found,
            "out-of-domain",
            "Table 3 · Out-of-domain evaluation",
            "Alpaca: length-controlled win rate of AlpacaEval 2. Math: accuracy on MATH-500. Both "
            "in percent, of suites of the same names.",
            ("main",),
            _columns(("Alpaca", "Math")),
            mean_figure,
        ),
        *_table(
            found,
            "distinct",
            "Table 4 · Distinct n-grams",
            "Share of different n-grams among all n-grams of the samples on held-out prompts, last "
            "iteration. The paper does not say of which of its models its figures are.",
            ("main", "hard"),
            [("KL", f"dist-{n}") for n in range(1, 5)],
            mean_figure,
        ),
        *_hard(found),
        *_table(
            found,
            "repeats",
            "Table 6 · Repeated runs",
            "Mean ± standard deviation over seeds.",
            ("main", "hard"),
            _columns(("WR", "AvgR"))[: 2 * len(DIVERGENCES)],
            spread_figure,
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
            mean_figure,
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
            places = [Place(name, setting, method, *each, experiment) for each in shown]
            figures = [fill(found, place) for place in places]
            if any(each.text != MISSING or each.paper for each in figures) or method in own:
                rows.append((method, figures))
        header = ["method", *(f"{divergence} {figure}" for divergence, figure in shown)]
        table = PaperTable(file_name(name, setting), title, setting, note, header, rows)
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
    """True where a setting has cells, or the paper has figures, under a divergence."""
    cells = [row for row in found.rows if row.experiment in experiments and row.setting == setting]
    known = {row.divergence for row in cells}
    known |= {
        each.divergence
        for each in found.published
        if (each.table, each.setting) == (table, setting)
    }
    return divergence in known or (divergence == AVERAGE and len(known) >= len(DIVERGENCES))


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
                    mean_figure(found, Place("hard", setting, method, "KL", figure, "hard"))
                    for figure in columns
                ],
            )
            for method in dict.fromkeys(methods)
        ]
        header = ["method", *columns]
        if columns:
            tables.append(
                PaperTable(file_name("hard", setting), title, setting, note, header, rows)
            )
    return tables


def _p_values(found: Findings) -> list[PaperTable]:
    """Welch's test of every method against f-DPO; adjusted within a setting and a figure."""
    title = f"Table 7 · p-values of the difference from {BASELINE}"
    note = (
        "Difference of means over seeds, and p of Welch's t test, as it is; those by Holm stand "
        "under what was found. A dash: fewer than two seeds, or no variation at all."
    )
    experiments = ("main", "hard")
    columns = _columns(("WR", "AvgR"))[: 2 * len(DIVERGENCES)]
    tables = _table(found, "p-values", title, note, experiments, columns, tested_figure)
    return [replace(each, rows=[row for row in each.rows if row[0] != BASELINE]) for each in tables]


def _responses(found: Findings) -> list[PaperTable]:
    """Bonus on all responses beside that on rejected ones, which are cells of the main table."""

    def fill(found: Findings, place: Place) -> PaperFigure:
        figure, _, on = place.figure.partition(", ")
        experiment = "responses" if on == "all" else "main"
        own = replace(place, figure=figure, experiment=experiment)
        return shown_figure(own.over_seeds(found)[1], figure, place.in_paper(found))

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
