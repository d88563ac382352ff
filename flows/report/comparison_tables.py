"""Tables of a comparison as a person reads them, and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flows.report.between import p_text
from flows.report.comparison import Comparison
from flows.report.last_iteration import HELD_OUT
from flows.report.statistics import Estimate
from flows.report.table import SUITE_COLUMNS, Cell

_FORM = ".3f"
_LATEX = str.maketrans(
    {
        **{each: f"\\{each}" for each in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "π": r"$\pi$",
        "κ": r"$\kappa$",
        "±": r"$\pm$",
        "−": r"$-$",
        "<": r"$<$",
    }
)


@dataclass(frozen=True)
class TextTable:
    """A table as a person reads it.

    Attributes:
        name: Name of its files.
        title: Its title.
        note: What its figures are.
        header: Titles of the columns.
        rows: Cells, an interval behind its figure.
    """

    name: str
    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(comparison: Comparison) -> list[TextTable]:
    """The tables: figures of each evaluation, differences by prompt, and over seeds."""
    found = [_figures_of(comparison, each) for each in comparison.evaluations()]
    if comparison.paired:
        found.append(_differences(comparison))
    if comparison.over_seeds:
        found.append(_seeds(comparison))
    return found


def latex(table: TextTable) -> str:
    """A table for LaTeX, with the rules of the package ``booktabs``."""
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{_escaped(f'{table.title}. {table.note}')}}}",
        f"\\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}",
        "\\toprule",
        " & ".join(map(_escaped, table.header)) + " \\\\",
        "\\midrule",
        *(" & ".join(map(_escaped, row)) + " \\\\" for row in table.rows),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.translate(_LATEX)


def _figures_of(comparison: Comparison, evaluation: str) -> TextTable:
    found = [each for each in comparison.findings if each.evaluation == evaluation]
    titles = list(dict.fromkeys(each.figure for each in found))
    cells = {
        (each.figure, each.run): _estimate(Estimate(each.value, each.low, each.high))
        for each in found
    }
    runs = list(dict.fromkeys(each.run for each in found))
    rows = [["method", *(comparison.methods[run] for run in runs)]]
    rows += [[title, *(cells.get((title, run), "-") for run in runs)] for title in titles]
    slug = "held-out" if evaluation == HELD_OUT else f"suite-{evaluation}"
    place = evaluation if evaluation == HELD_OUT else f"suite {evaluation}"
    note = "After the last iteration; 95 % intervals over prompts. Ties lose."
    return TextTable(f"figures-{slug}", f"Figures on {place}", note, ["figure", *runs], rows)


def _differences(comparison: Comparison) -> TextTable:
    rows = [
        [
            *(f"{each.run} − {each.against}", each.evaluation, figure_title(each.compared.figure)),
            str(each.compared.iteration),
            _estimate(
                Estimate(each.compared.difference, each.compared.low, each.compared.high), "+.3f"
            ),
            *(p_text(each.compared.p_value), p_text(each.compared.adjusted_p_value)),
            str(each.compared.prompts),
        ]
        for each in comparison.paired
    ]
    header = ["runs", "evaluation", "figure", "iteration", "difference", "p", "p by Holm"]
    note = (
        "Paired by prompt: bootstrap interval, permutation test. It says that checkpoints differ, "
        "not that methods do: for that, repeat with seeds. Holm's adjustment is over all rows."
    )
    return TextTable("differences", "Differences of runs", note, [*header, "prompts"], rows)


def _seeds(comparison: Comparison) -> TextTable:
    rows = [
        [
            *(each.method, each.evaluation, each.figure, str(each.seeds)),
            _estimate(each.mean),
            _estimate(each.difference, "+.3f") if each.difference else "-",
            "-" if each.difference is None else p_text(each.p_value),
            "-" if each.difference is None else p_text(each.adjusted_p_value),
        ]
        for each in comparison.over_seeds
    ]
    header = ["method", "evaluation", "figure", "seeds", "mean", "against the first", "p"]
    note = (
        "Student's 95 % intervals over seeds; Welch's t test against the first method. Holm's "
        "adjustment is over the methods, figure by figure."
    )
    return TextTable("over-seeds", "Methods over seeds", note, [*header, "p by Holm"], rows)


def figure_title(name: str) -> str:
    """Title of a figure by its name in ``metrics.json``."""
    titles = {each.name: each.title for each in SUITE_COLUMNS}
    return titles.get(name, name.removeprefix("components."))


def _estimate(estimate: Estimate, form: str = _FORM) -> str:
    return str(Cell.of(estimate, form))
