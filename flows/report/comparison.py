"""Comparison of runs: figures, and tests against the first run and its method.

Runs whose configurations differ only in seed and name are repetitions of one method; in a sweep,
runs of one combination of the grid are. Methods are in the order in which their first runs are
given. Methods with several runs are tested against the first over seeds, single runs by prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from flows.execution.plan import differences
from flows.report.plots import (
    RESULTS,
    RESULTS_AXIS,
    course_figure,
    histogram_figure,
    results_line,
    spread_figure,
)
from flows.report.rows import (
    HELD_OUT,
    MethodRow,
    Paired,
    Row,
    adjusted,
    compared,
    method_labels,
    method_rows,
    p_text,
    run_rows,
    told,
)
from flows.report.summary import Summary, last_iteration
from flows.report.table import COLUMNS, DROPPED_FIRST, POLICY, Cell, Estimate, FittedTable, ordered
from stages.contract.errors import UserError

# Figures by which runs are tested; each further one costs power to Holm's adjustment.
_TESTED = ("mean_reward", "win_rate", "accuracy", "mean_log_pi_ref")
# Figures that are drawn over seeds.
_DRAWN = {
    "mean_reward": "mean reward, held-out prompts",
    "win_rate": "win rate over the base, ties lost",
}
# With fewer runs a test over seeds finds next to nothing.
_ENOUGH_SEEDS = 3
# The verdict reads this figure of this evaluation.
_DECISIVE = (HELD_OUT, "mean_reward")
_COLUMNS = {each.name: each for each in COLUMNS}
_CURVES = (*RESULTS, ("mean_log_pi_ref", "log π_ref of the samples", "log π_ref", None))


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        methods: Label of each run's method, by the run's name.
        paired: Each run against the first, by prompt; empty if methods are tested over seeds.
        over_seeds: Methods over their seeds; empty if no method has two.
        settings: What differs from the first run's settings, by method.
        page: Address of its page, once it is written.
    """

    runs: Sequence[Summary]
    methods: Mapping[str, str]
    rows: list[Row]
    paired: list[Paired]
    over_seeds: list[MethodRow]
    settings: Mapping[str, list[str]]
    name: str = ""
    page: str = ""

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "verdict": self.verdict(),
            "methods": self.methods,
            "settings": self.settings,
            "figures": [asdict(each) for each in self.rows],
            "paired_differences": [asdict(each) for each in self.paired],
            "over_seeds": [each.to_json() for each in self.over_seeds],
        }

    def verdict(self) -> str:
        """Which runs, or methods over seeds, are better than the first, and how far to trust it."""
        methods, names = list(dict.fromkeys(self.methods.values())), list(self.methods)
        # Repetitions of one method alone are compared as runs are.
        own = self.over_seeds if len(methods) > 1 else []
        first, *others = methods if own else names
        if not others:
            return f"{first} is the only one: there is nothing to compare it with."
        tested: dict[tuple[str, ...], tuple[Estimate | None, float | None]] = {}
        for row in self.over_seeds:
            tested[row.method, row.evaluation, row.figure] = row.difference, row.adjusted_p_value
        for each in self.paired:
            place = each.run, each.evaluation, each.figure
            tested[place] = each.estimate(), each.adjusted_p_value
        found = [told(each, *tested.get((each, *_DECISIVE), (None, None))) for each in others]
        decisive = [each for each in own if (each.evaluation, each.figure) == _DECISIVE]
        fewest = min((len(each.values) for each in decisive), default=_ENOUGH_SEEDS)
        few = f" A method has {fewest} runs: too few." if fewest < _ENOUGH_SEEDS else ""
        unfinished = "".join(
            f" {each.run} has {last_iteration(each) or 0} of {each.config.iterations} iterations."
            for each in self.runs
            if last_iteration(each) != each.config.iterations
        )
        told_of = f"By mean reward on the {HELD_OUT}, against {first}: {'; '.join(found)}."
        return f"{told_of}{few}{unfinished}"

    def tables(self) -> list[FittedTable]:
        """The tables: methods over seeds with their tests, runs, and differences by prompt."""
        evaluations = list(dict.fromkeys(each.evaluation for each in self.rows))
        found = [self._over_seeds(each) for each in evaluations] if self.over_seeds else []
        found += [self._tests()] if any(each.difference for each in self.over_seeds) else []
        found += [self._figures(each) for each in evaluations]
        found += [self._differences()] if self.paired else []
        changed = [[name, each] for name, changes in self.settings.items() for each in changes]
        title = f"Settings that differ from those of {self.runs[0].run}"
        table = FittedTable(title, ["method", "setting"], changed, left=2, name="settings")
        return [*found, table] if changed else found

    def _over_seeds(self, evaluation: str) -> FittedTable:
        found = [each for each in self.over_seeds if each.evaluation == evaluation]
        cells = {(each.method, each.figure): each.shown(_form(each.figure)) for each in found}
        counts = {each.method: [str(len(each.values))] for each in found}
        note = "Mean ± standard deviation over seeds; Student's 95 % intervals of the mean."
        return _table(
            evaluation, "Methods over seeds", "over-seeds", ["seeds"], counts, cells, note
        )

    def _figures(self, evaluation: str) -> FittedTable:
        found = [each for each in self.rows if each.evaluation == evaluation]
        cells = {
            (each.run, each.figure): Cell.of(
                Estimate(each.value, each.low, each.high), _form(each.figure)
            )
            for each in found
        }
        methods = {each.run: [self.methods[each.run]] for each in found}
        note = "After the last iteration; 95 % intervals over prompts. Ties lose."
        return _table(evaluation, "Runs", "figures", ["method"], methods, cells, note)

    def _differences(self) -> FittedTable:
        rows: list[list[str | Cell]] = [
            [
                *(f"{each.run} − {each.against}", each.evaluation, figure_title(each.figure)),
                *(str(each.iteration), each.shown()),
                *(p_text(each.p_value), p_text(each.adjusted_p_value), str(each.prompts)),
            ]
            for each in self.paired
        ]
        header = ["runs", "evaluation", "figure", "iteration", "difference", "p", "p by Holm"]
        note = (
            "Paired by prompt: bootstrap interval, permutation test. It says that checkpoints "
            "differ, not that methods do: for that, repeat with seeds. Holm's adjustment is over "
            "all rows."
        )
        title = "Differences of runs"
        return FittedTable(title, [*header, "prompts"], rows, left=1, note=note, name="differences")

    def _tests(self) -> FittedTable:
        rows: list[list[str | Cell]] = [
            [
                *(each.method, each.evaluation, figure_title(each.figure)),
                *(Cell.of(each.difference, "+.3f"), each.test),
                *(p_text(each.difference.p_value), p_text(each.adjusted_p_value)),
            ]
            for each in self.over_seeds
            if each.difference and each.figure in _TESTED
        ]
        first = self.over_seeds[0].method
        header = ["method", "evaluation", "figure", "difference", "test", "p", "p by Holm"]
        note = (
            "Tests over seeds with 95 % intervals. Paired: Student's t test of the differences of "
            "runs with the same seed. Welch: Welch's t test, for methods with other seeds. Holm's "
            "adjustment is over the methods, figure by figure; other figures are in over-seeds.csv."
        )
        title, first_out = f"Tests over seeds, minus {first}", ("test", "p", "evaluation")
        return FittedTable(
            title, header, rows, dropped_first=first_out, left=3, note=note, name="tests"
        )

    def drawings(self) -> dict[str, Figure]:
        """Curves by iteration and distributions of log π_ref, by the names of their files."""
        drawn: dict[str, Figure] = {}
        evaluated = {run.run: run.rows[: (last_iteration(run) or 0) + 1] for run in self.runs}
        for name, title, ylabel, bounds in _CURVES:
            lines = {run: results_line(rows, name) for run, rows in evaluated.items()}
            lines = {run: line for run, line in lines.items() if line.x}
            if any(len(each.x) > 1 for each in lines.values()):
                figure = course_figure(title, lines, RESULTS_AXIS, ylabel, bounds=bounds)
                drawn[f"curve-{name.replace('_', '-')}"] = figure
        last = {run.run: training_log_pi_ref(run) for run in self.runs}
        if samples := {name: values for name, values in last.items() if values}:
            title = "log π_ref of the last iteration's training responses"
            drawn["log-pi-ref-of-training"] = histogram_figure(title, samples, "log π_ref")
        rows = [each for each in self.over_seeds if each.evaluation == HELD_OUT]
        panels = {
            label: [each for each in rows if each.figure == name] for name, label in _DRAWN.items()
        }
        if known := {label: found for label, found in panels.items() if found}:
            drawn["over-seeds"] = spread_figure("95 % intervals over seeds", known)
        return drawn


def _table(
    evaluation: str,
    title: str,
    name: str,
    titles: Sequence[str],
    known: Mapping[str, Sequence[str]],
    cells: Mapping[tuple[str, str], Cell],
    note: str,
) -> FittedTable:
    """A table of one evaluation: a row for each of ``known``, a column for each figure."""
    is_suite = evaluation != HELD_OUT
    figures = ordered(dict.fromkeys(figure for _, figure in cells))
    return FittedTable(
        f"{title}, {'suite ' if is_suite else ''}{evaluation}",
        [title.split()[0].lower().removesuffix("s"), *titles, *map(figure_title, figures)],
        [
            [label, *own, *(cells.get((label, each), Cell("-")) for each in figures)]
            for label, own in known.items()
        ],
        dropped_first=DROPPED_FIRST,
        left=1 + titles.count("method"),
        note=note,
        name=f"{name}-suite-{evaluation}" if is_suite else f"{name}-held-out",
    )


def figure_title(name: str) -> str:
    """Title of a figure by its name in ``metrics.json``."""
    return _COLUMNS[name].title if name in _COLUMNS else name.removeprefix("components.")


def _form(name: str) -> str:
    return _COLUMNS[name].form if name in _COLUMNS else ".3f"


def compare_summaries(
    runs: Sequence[Summary], labels: Mapping[str, str] | None = None
) -> Comparison:
    """Compares runs after their last iterations; see :class:`Comparison`.

    ``labels`` are the methods' by the runs' names; None tells methods by configurations. UserError
    if a run has no evaluation.
    """
    last = {each.run: last_iteration(each) for each in runs}
    for run in (run for run, iteration in last.items() if iteration is None):
        raise UserError(f"run {run} has no evaluation", f"`geb resume {run}`, or leave it out")
    methods = labels or method_labels(runs)
    rows = [row for each in runs for row in run_rows(each, methods[each.run])]
    over_seeds = method_rows(rows, list(methods.values()))
    if all(len(each.values) < 2 for each in over_seeds):
        over_seeds = []
    first, *others = runs
    if over_seeds and len(set(methods.values())) > 1:
        # What one run has over another says nothing of methods.
        others = []
    paired = [
        each
        for run in others
        for suite in (None, *first.config.suites)
        # The last iteration of the shorter one.
        for each in compared(
            first, run, min(last[first.run] or 0, last[run.run] or 0), _TESTED, suite
        )
    ]
    return Comparison(runs, methods, rows, adjusted(paired), over_seeds, _settings(runs, methods))


def _settings(runs: Sequence[Summary], methods: Mapping[str, str]) -> dict[str, list[str]]:
    """Settings of each method that differ from the first run's, but for name and seed."""
    found: dict[str, list[str]] = {}
    first, *_ = values = [{**each.config.to_values(), "name": "", "seed": 0} for each in runs]
    for run, own in zip(runs, values, strict=True):
        found.setdefault(methods[run.run], list(differences(first, own)))
    return {method: changes for method, changes in found.items() if changes}


def training_log_pi_ref(run: Summary) -> list[float]:
    """Log π_ref of the responses that the last iteration trained on, chosen and rejected.

    π_ref is what that training measured against (``train.reference``).
    """
    trained = run.last("train")
    if trained is None:
        return []
    table = pq.read_table(trained.file("reference_logprobs.parquet"))
    sides = ("chosen_logprobs", "rejected_logprobs")
    return [sum(each) for side in sides for each in table[side].to_pylist()]


def held_out_log_pi_ref(run: Summary) -> list[float]:
    """Log π_ref under the base of the last iteration's samples on held-out prompts.

    Empty where ``evaluate.log_pi_ref`` is off.
    """
    evaluated = run.last("evaluate")
    if evaluated is None:
        return []
    columns = pq.read_table(
        evaluated.file("distributions.parquet"), columns=["model", "log_pi_ref"]
    )
    known: list[float] = (
        columns.filter(pc.equal(columns["model"], POLICY))["log_pi_ref"].drop_null().to_pylist()
    )
    return known
