"""Comparison of runs: figures, tests against the first run and its method, and their files.

Runs whose configurations differ only in seed and name are repetitions of one method. Methods are in
the order in which their first runs are given, and are tested against the first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from matplotlib.figure import Figure

from flows.execution.run_record import RunRecord, recorded, run_of
from flows.pipeline.checks import is_name, require_name
from flows.report.files import csv_text, json_text, render, write_file
from flows.report.plots import (
    RESULTS,
    RESULTS_AXIS,
    course_figure,
    histogram_figure,
    png,
    results_line,
    svg,
)
from flows.report.rows import (
    HELD_OUT,
    MethodRow,
    Paired,
    Row,
    adjusted,
    compared,
    last_iteration,
    method_rows,
    p_text,
    run_rows,
)
from flows.report.summary import Summary, kappa_label, summarise
from flows.report.table import SUITE_COLUMNS, Cell, Estimate, FittedTable
from stages.contract.errors import UserError
from stages.store.base import Store

# Figures by which runs are tested; each further one costs power to Holm's adjustment.
_TESTED = ("mean_reward", "win_rate", "accuracy", "mean_log_pi_ref")
# The verdict reads this figure of this evaluation.
_DECISIVE = (HELD_OUT, "mean_reward")
_SIGNIFICANT = 0.05
# Settings in which repetitions of one method may differ.
_NOT_OF_THE_METHOD = (
    *("name", "seed", "model", "store", "resources", "execution", "estimation", "tracking"),
)
_CURVES = (*RESULTS, ("mean_log_pi_ref", "log π_ref of the samples", "log π_ref", None))


@dataclass
class Comparison:
    """Several runs side by side.

    Attributes:
        runs: The runs, in the order given.
        methods: Label of each run's method, by the run's name.
        rows: Figures of every run.
        paired: Each run against the first, prompt by prompt.
        over_seeds: Methods over their seeds; empty where no method has two.
    """

    runs: Sequence[Summary]
    methods: dict[str, str]
    rows: list[Row]
    paired: list[Paired]
    over_seeds: list[MethodRow]

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "verdict": self.verdict(),
            "methods": self.methods,
            "figures": [asdict(each) for each in self.rows],
            "paired_differences": [asdict(each) for each in self.paired],
            "over_seeds": [each.to_json() for each in self.over_seeds],
        }

    def verdict(self) -> str:
        """One sentence: which runs, or methods over seeds, are better than the first.

        A difference can be told if its p-value, by Holm, is below 0.05.
        """
        methods, names = list(dict.fromkeys(self.methods.values())), list(self.methods)
        # Repetitions of one method alone are compared as runs are.
        first, *others = methods if self.over_seeds and len(methods) > 1 else names
        tested: dict[tuple[str, ...], tuple[Estimate | None, float | None]] = {}
        for row in self.over_seeds:
            own = row.difference, row.adjusted_p_value
            tested[row.method, row.evaluation, row.figure] = own
        for each in self.paired:
            found = Estimate(each.difference, each.low, each.high)
            tested[each.run, each.evaluation, each.figure] = found, each.adjusted_p_value
        told = [_told(each, *tested.get((each, *_DECISIVE), (None, None))) for each in others]
        return f"By mean reward on the {HELD_OUT}, against {first}: {'; '.join(told)}."

    def tables(self) -> list[FittedTable]:
        """The tables: figures of each evaluation, differences by prompt, and over seeds."""
        found = [self._figures(each) for each in dict.fromkeys(r.evaluation for r in self.rows)]
        found += [self._differences()] if self.paired else []
        return found + ([self._seeds()] if self.over_seeds else [])

    def _figures(self, evaluation: str) -> FittedTable:
        found = [each for each in self.rows if each.evaluation == evaluation]
        runs = list(dict.fromkeys(each.run for each in found))
        known = {
            (each.figure, each.run): Estimate(each.value, each.low, each.high) for each in found
        }
        rows: list[list[str | Cell]] = [["method", *(self.methods[run] for run in runs)]]
        for figure in dict.fromkeys(each.figure for each in found):
            cells = [Cell.of(known.get((figure, run)), ".3f") for run in runs]
            rows.append([figure_title(figure), *cells])
        is_suite = evaluation != HELD_OUT
        return FittedTable(
            f"Figures on {'suite ' if is_suite else ''}{evaluation}",
            ["figure", *runs],
            rows,
            left=1,
            note="After the last iteration; 95 % intervals over prompts. Ties lose.",
            name=f"figures-suite-{evaluation}" if is_suite else "figures-held-out",
        )

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

    def _seeds(self) -> FittedTable:
        rows: list[list[str | Cell]] = [
            [
                *(each.method, each.evaluation, figure_title(each.figure), str(len(each.values))),
                *(Cell.of(each.mean, ".3f"), Cell.of(each.difference, "+.3f")),
                p_text(each.difference.p_value) if each.difference else "-",
                p_text(each.adjusted_p_value) if each.difference else "-",
            ]
            for each in self.over_seeds
        ]
        header = ["method", "evaluation", "figure", "seeds", "mean", "against the first", "p"]
        note = (
            "Student's 95 % intervals over seeds; Welch's t test against the first method. Holm's "
            "adjustment is over the methods, figure by figure."
        )
        title, name = "Methods over seeds", "over-seeds"
        return FittedTable(title, [*header, "p by Holm"], rows, left=1, note=note, name=name)

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
        return drawn


def _told(name: str, difference: Estimate | None, p_value: float | None) -> str:
    """A run or method in the verdict."""
    if difference is None:
        return f"{name}: no difference can be told, no shared prompt's reward differs"
    found = f"{Cell.of(difference, '+.3f')}, {p_text(p_value)}"
    if p_value is None or p_value >= _SIGNIFICANT:
        return f"{name}: no difference can be told, {found}"
    return f"{name} is {'better' if difference.value > 0 else 'worse'}, {found}"


def figure_title(name: str) -> str:
    """Title of a figure by its name in ``metrics.json``."""
    titles = {each.name: each.title for each in SUITE_COLUMNS}
    return titles.get(name, name.removeprefix("components."))


def compare_summaries(runs: Sequence[Summary]) -> Comparison:
    """Compares runs after their last iterations; see :class:`Comparison`.

    Raises:
        UserError: There are fewer than two runs, one is given twice, or one has no evaluation.
    """
    names = [each.run for each in runs]
    if len(set(names)) < 2 or len(set(names)) != len(names):
        raise UserError(
            f"{', '.join(names) or 'nothing'} cannot be compared",
            "name two or more runs, each once; `geb status` lists them",
        )
    last = {each.run: last_iteration(each) for each in runs}
    for run in (run for run, iteration in last.items() if iteration is None):
        raise UserError(f"run {run} has no evaluation", f"`geb resume {run}`, or leave it out")
    methods = method_labels(runs)
    rows = [row for each in runs for row in run_rows(each, methods[each.run])]
    over_seeds = method_rows(rows, list(methods.values()))
    if all(len(each.values) < 2 for each in over_seeds):
        over_seeds = []
    first, *others = runs
    paired = [
        each
        for run in others
        for suite in (None, *first.config.suites)
        # The last iteration of the shorter one.
        for each in compared(
            first, run, [min(last[first.run] or 0, last[run.run] or 0)], _TESTED, suite
        )
    ]
    return Comparison(runs, methods, rows, adjusted(paired), over_seeds)


def method_labels(runs: Sequence[Summary]) -> dict[str, str]:
    """The method of each run by the run's name; repetitions have the same label."""
    labels: dict[str, str] = {}
    known: dict[str, str] = {}
    for run in runs:
        whole = json.loads(run.config.to_json())
        own = {name: value for name, value in whole.items() if name not in _NOT_OF_THE_METHOD}
        method = json.dumps(own, sort_keys=True)
        if method not in known:
            known[method] = _label(run, set(known.values()))
        labels[run.run] = known[method]
    return labels


def _label(run: Summary, taken: set[str]) -> str:
    train = run.config.train
    design = "f-DPO" if train.design == "none" else train.design
    label = ", ".join(filter(None, (design, str(train.divergence), kappa_label(train))))
    return label if label not in taken else f"{label} ({run.run})"


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


def compare_runs(store: Store, runs: Sequence[str], name: str = "") -> tuple[Comparison, str, str]:
    """Compares runs and writes the files into the folder of the comparison in the store.

    Args:
        store: The store.
        runs: Names of two or more runs, or of models of their last iterations.
        name: Name of the comparison; empty makes one of the runs' names.

    Returns:
        What was found, the name, and the address of the HTML page; other files are beside it.

    Raises:
        UserError: There is no such run, nothing to compare, or the name is that of a run.
    """
    summaries = [_summary(store, each) for each in runs]
    found = compare_summaries(summaries)
    chosen = name or _name([each.run for each in summaries])
    # It becomes the name of a folder beside those of runs.
    require_name(chosen, "comparison")
    if chosen in recorded(store):
        raise UserError(f"{chosen!r} is a run of the store", "give the comparison another name")
    folder = store.run_path(chosen)
    page, *_ = write_files(found, folder)
    store.share(folder)
    return found, chosen, store.share(page)


def _summary(store: Store, name: str) -> Summary:
    run, version = run_of(store, name)
    found = summarise(RunRecord.existing(store, run))
    last = last_iteration(found)
    if version and last and not version.step.startswith(f"iteration-{last}/"):
        raise UserError(
            f"{name} is of {version.step} of the run {run}, whose last iteration is {last}",
            f"runs are compared after their last iterations: name {run}, or compare any two models "
            "with `geb evaluate CONFIG MODEL --base MODEL`",
        )
    return found


def _name(runs: Sequence[str]) -> str:
    plain = "-".join(["compare", *runs])
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return plain if is_name(plain) else f"{plain[:80]}-{digest}"


def write_files(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes everything into a folder, which is made, and returns the page first.

    Args:
        comparison: The comparison.
        folder: Where files of an earlier comparison of the same name are replaced.
    """
    drawn, tables, document = comparison.drawings(), comparison.tables(), comparison.to_json()
    page = render(
        "comparison.html.jinja",
        title=", ".join(comparison.methods),
        comparison=comparison,
        tables=tables,
        plots=[svg(each) for each in drawn.values()],
    )
    content: dict[str, str | bytes] = {
        "comparison.html": page,
        "comparison.json": json_text(document),
        **{f"{name}.png": png(figure) for name, figure in drawn.items()},
        **{f"{table.name}.tex": table.latex() for table in tables},
    }
    for name, rows in document.items():
        if isinstance(rows, list) and rows:
            content[f"{name.replace('_', '-')}.csv"] = csv_text(rows)
    return [write_file(folder / name, each) for name, each in content.items()]
