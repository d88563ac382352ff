"""Comparison of runs: figures, and tests against the first run and its method.

Runs whose configurations differ only in seed and name are repetitions of one method; in a sweep,
runs of one combination of the grid are. Methods are in the order in which their first runs are
given. Methods with several runs are tested against the first over seeds, single runs by prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure

from flows.execution.plan import differences
from flows.report.plots import draw
from flows.report.rows import (
    HELD_OUT,
    MethodRow,
    Paired,
    Row,
    adjusted,
    compared,
    difference_text,
    method_labels,
    method_rows,
    p_text,
    run_rows,
)
from flows.report.summary import Summary, last_iteration
from flows.report.table import Cell, FittedTable, column_of, ordered
from stages.contract.errors import UserError
from stages.evaluate.statistics import Estimate

# Figures by which runs are tested; each further one costs power to Holm's adjustment.
_TESTED = ("mean_reward", "win_rate", "accuracy", "mean_log_pi_ref")
# With fewer runs a test over seeds finds next to nothing.
_ENOUGH_SEEDS = 3
# The verdict reads this figure of this evaluation.
_DECISIVE = (HELD_OUT, "mean_reward")


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
            "figures": [asdict(row) for row in self.rows],
            "paired_differences": [asdict(pair) for pair in self.paired],
            "over_seeds": [asdict(row) for row in self.over_seeds],
        }

    def verdict(self) -> str:
        """Which runs, or methods over seeds, are better than the first, and how far to trust it."""
        methods = list(dict.fromkeys(self.methods.values()))
        # Repetitions of one method alone are compared as runs are.
        by_method = bool(self.over_seeds) and len(methods) > 1
        first, *others = methods if by_method else list(self.methods)
        if not others:
            return f"{first} is the only one: there is nothing to compare it with."
        tests = self._decisive_tests()
        differences = [difference_text(name, *tests.get(name, (None, None))) for name in others]
        sentences = [
            f"By mean reward on the {HELD_OUT}, against {first}: {'; '.join(differences)}."
        ]
        if by_method:
            sentences += self._too_few_seeds()
        for run in self.runs:
            done = last_iteration(run) or 0
            if done != run.config.iterations:
                sentences.append(f"{run.run} has {done} of {run.config.iterations} iterations.")
        return " ".join(sentences)

    def _decisive_tests(self) -> dict[str, tuple[Estimate | None, float | None]]:
        """Difference of the mean reward from the first, and its p-value, by method and run."""
        tests: dict[str, tuple[Estimate | None, float | None]] = {}
        for row in self.over_seeds:
            if (row.evaluation, row.figure) == _DECISIVE:
                tests[row.method] = (row.difference, row.adjusted_p_value)
        for pair in self.paired:
            if (pair.evaluation, pair.figure) == _DECISIVE:
                tests[pair.run] = (pair.difference, pair.adjusted_p_value)
        return tests

    def _too_few_seeds(self) -> list[str]:
        numbers = [
            len(row.values) for row in self.over_seeds if (row.evaluation, row.figure) == _DECISIVE
        ]
        fewest = min(numbers, default=_ENOUGH_SEEDS)
        return [f"A method has {fewest} runs: too few."] if fewest < _ENOUGH_SEEDS else []

    def tables(self) -> list[FittedTable]:
        """The tables: methods over seeds with their tests, runs, and differences by prompt."""
        evaluations = list(dict.fromkeys(row.evaluation for row in self.rows))
        tables = []
        if self.over_seeds:
            tables += [self._over_seeds(evaluation) for evaluation in evaluations]
        if any(row.difference for row in self.over_seeds):
            tables.append(self._tests())
        tables += [self._figures(evaluation) for evaluation in evaluations]
        if self.paired:
            tables.append(self._differences())
        if self.settings:
            tables.append(self._changed_settings())
        return tables

    def _over_seeds(self, evaluation: str) -> FittedTable:
        rows = [row for row in self.over_seeds if row.evaluation == evaluation]
        return _table(
            evaluation,
            title="Methods over seeds",
            header=["method", "seeds"],
            labels={row.method: [str(len(row.values))] for row in rows},
            cells={(row.method, row.figure): row.shown(column_of(row.figure).form) for row in rows},
            note="Mean ± standard deviation over seeds; Student's 95 % intervals of the mean.",
        )

    def _figures(self, evaluation: str) -> FittedTable:
        rows = [row for row in self.rows if row.evaluation == evaluation]
        return _table(
            evaluation,
            title="Runs",
            header=["run", "method"],
            labels={row.run: [self.methods[row.run]] for row in rows},
            cells={(row.run, row.figure): row.shown(column_of(row.figure).form) for row in rows},
            note="After the last iteration; 95 % intervals over prompts. Ties lose.",
        )

    def _differences(self) -> FittedTable:
        header = [
            "runs",
            "figure",
            "difference",
            "p by Holm",
            "evaluation",
            "p",
            "prompts",
            "iteration",
        ]
        rows: list[list[str | Cell]] = [
            [
                f"{pair.run} − {pair.against}",
                column_of(pair.figure).title,
                pair.shown(),
                p_text(pair.adjusted_p_value),
                pair.evaluation,
                p_text(pair.difference.p_value),
                str(pair.prompts),
                str(pair.iteration),
            ]
            for pair in self.paired
        ]
        note = (
            "Paired by prompt: bootstrap interval, permutation test. It says that checkpoints "
            "differ, not that methods do: for that, repeat with seeds. Holm's adjustment is over "
            "all rows."
        )
        return FittedTable("Differences of runs", header, rows, left=1, note=note)

    def _tests(self) -> FittedTable:
        header = ["method", "figure", "difference", "p by Holm", "evaluation", "p", "test"]
        rows: list[list[str | Cell]] = [
            [
                row.method,
                column_of(row.figure).title,
                Cell.of(row.difference, "+.3f"),
                p_text(row.adjusted_p_value),
                row.evaluation,
                p_text(row.difference.p_value),
                row.test,
            ]
            for row in self.over_seeds
            if row.difference and row.figure in _TESTED
        ]
        note = (
            "Tests over seeds with 95 % intervals. Paired: Student's t test of the differences of "
            "runs with the same seed. Welch: Welch's t test, for methods with other seeds. Holm's "
            "adjustment is over the methods, figure by figure; other figures are in --json."
        )
        return FittedTable(
            f"Tests over seeds, minus {self.over_seeds[0].method}",
            header,
            rows,
            left=2,
            note=note,
        )

    def _changed_settings(self) -> FittedTable:
        rows = [[name, change] for name, changes in self.settings.items() for change in changes]
        title = f"Settings that differ from {self.runs[0].run}"
        return FittedTable(title, ["method", "setting"], rows, left=2)

    def drawings(self) -> dict[str, Figure]:
        """Curves of the runs by iteration, by their titles."""
        return draw({run.run: run.rows[: (last_iteration(run) or 0) + 1] for run in self.runs})


def _table(
    evaluation: str,
    *,
    title: str,
    header: Sequence[str],
    labels: Mapping[str, Sequence[str]],
    cells: Mapping[tuple[str, str], Cell],
    note: str,
) -> FittedTable:
    """A table of one evaluation: a row for each of ``labels``, a column for each figure."""
    is_suite = evaluation != HELD_OUT
    figures = ordered(dict.fromkeys(figure for _, figure in cells))
    rows: list[list[str | Cell]] = [
        [label, *texts, *(cells.get((label, figure), Cell("-")) for figure in figures)]
        for label, texts in labels.items()
    ]
    return FittedTable(
        f"{title}, {'suite ' if is_suite else ''}{evaluation}",
        [*header, *(column_of(figure).title for figure in figures)],
        rows,
        left=1 + header[1:].count("method"),
        note=note,
    )


def compare_summaries(
    runs: Sequence[Summary], labels: Mapping[str, str] | None = None
) -> Comparison:
    """Compares runs after their last iterations; see :class:`Comparison`.

    ``labels`` are the methods' by the runs' names; None tells methods by configurations. UserError
    if a run has no evaluation.
    """
    for run in runs:
        if last_iteration(run) is None:
            raise UserError(
                f"run {run.run} has no evaluation", f"`geb resume {run.run}`, or leave it out"
            )
    methods = labels or method_labels(runs)
    rows = [row for run in runs for row in run_rows(run, methods[run.run])]
    over_seeds = method_rows(rows, list(methods.values()))
    if all(len(row.values) < 2 for row in over_seeds):
        over_seeds = []
    paired: list[Paired] = []
    # If methods are tested over seeds, what one run has over another says nothing of methods.
    if not over_seeds or len(set(methods.values())) == 1:
        paired = adjusted(_paired(runs))
    return Comparison(runs, methods, rows, paired, over_seeds, _settings(runs, methods))


def _paired(runs: Sequence[Summary]) -> list[Paired]:
    """Differences of each run from the first, prompt by prompt."""
    first, *others = runs
    pairs: list[Paired] = []
    for run in others:
        # The last iteration of the shorter one.
        iteration = min(last_iteration(first) or 0, last_iteration(run) or 0)
        for suite in (None, *first.config.suites):
            pairs += compared(first, run, iteration, _TESTED, suite)
    return pairs


def _settings(runs: Sequence[Summary], methods: Mapping[str, str]) -> dict[str, list[str]]:
    """Settings of each method that differ from the first run's, except name and seed."""
    settings: dict[str, list[str]] = {}
    values = [run.config.to_values() | {"name": "", "seed": 0} for run in runs]
    for run, own_values in zip(runs, values, strict=True):
        settings.setdefault(methods[run.run], list(differences(values[0], own_values)))
    return {method: changes for method, changes in settings.items() if changes}
