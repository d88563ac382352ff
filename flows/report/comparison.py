"""Comparison of runs: figures, and tests against the first run and its method.

Runs that differ only in seed, name, and settings of speed or place are repetitions of one method;
in a sweep, runs of one combination of the grid are. Methods are in the order in which their first
runs are given. Methods with several runs are tested against the first over seeds, single runs by
prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flows.execution.plan import differences
from flows.pipeline.config import UNUSED_BY_SUITES, RunConfig
from flows.pipeline.step import suite_step_name
from flows.report.differences import (
    Difference,
    adjusted,
    compared,
    difference_text,
    method_differences,
    p_text,
)
from flows.report.rows import (
    HELD_OUT,
    MethodFigure,
    by_figure,
    evaluations,
    method_figures,
    method_labels,
    read_other_files,
)
from flows.report.summary import Summary
from flows.report.table import (
    FigureRow,
    FittedTable,
    Lines,
    column_of,
    figures_table,
)
from stages.contract.errors import UserError

# Figures by which runs are tested; each further one costs power to Holm's adjustment.
_TESTED = ("mean_reward", "win_rate", "accuracy", "mean_log_pi_ref")
# With fewer runs a test over seeds finds next to nothing.
_ENOUGH_SEEDS = 3
# The verdict reads this figure of this evaluation.
_DECISIVE = (HELD_OUT, "mean_reward")
_BY_PROMPT = (
    "Paired by prompt: bootstrap interval, permutation test. It says that checkpoints differ, not "
    "that methods do: for that, repeat with seeds. Holm's adjustment is over all rows."
)
_OVER_SEEDS = (
    "Tests over seeds with 95 % intervals. Paired: Student's t test of the differences of runs "
    "with the same seed. Welch: Welch's t test, for methods with other seeds. Holm's adjustment is "
    "over the methods, figure by figure; other figures are in --json."
)


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side.

    Attributes:
        methods: Label of each run's method, by the run's name.
        over_seeds: Methods over their seeds; empty if no method has two.
        differences: Methods against the first over seeds, or runs against the first by prompt.
        settings: What differs from the first run's settings, by method.
        page: Address of its page, once it is written.
    """

    runs: Sequence[Summary]
    methods: Mapping[str, str]
    over_seeds: list[MethodFigure]
    differences: list[Difference]
    settings: Mapping[str, list[str]]
    name: str = ""
    page: str = ""

    @property
    def by_method(self) -> bool:
        """True if methods are compared; repetitions of one method alone are, as runs are."""
        return bool(self.over_seeds) and len(set(self.methods.values())) > 1

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        figures: dict[str, dict[str, Any]] = {}
        for run in self.runs:
            figures[run.run] = {}
            for evaluation, row in evaluations(run).items():
                figures[run.run][evaluation] = asdict(row)
        return {
            "verdict": self.verdict(),
            "methods": self.methods,
            "seeds": {run.run: run.config.seed for run in self.runs},
            "settings": self.settings,
            "figures": figures,
            "over_seeds": [asdict(figure) for figure in self.over_seeds],
            "differences": [asdict(difference) for difference in self.differences],
        }

    def verdict(self) -> str:
        """Which runs, or methods over seeds, are better than the first, and how far to trust it."""
        names = self.methods.values() if self.by_method else self.methods
        first, *others = dict.fromkeys(names)
        if not others:
            return f"{first} is the only one: there is nothing to compare it with."
        decisive = {}
        for difference in self.differences:
            if (difference.evaluation, difference.figure) == _DECISIVE:
                decisive[difference.name] = difference
        texts = {name: difference_text(name, decisive.get(name)) for name in others}
        seeds = dict.fromkeys(names, 0)
        if self.by_method:
            for figure in self.over_seeds:
                seeds[figure.method] = max(seeds[figure.method], len(figure.values))
            for name in others:
                if not seeds[name] or not seeds[first]:
                    texts[name] = f"{name}: no run of {name if seeds[first] else first} is finished"
        parts = "; ".join(texts.values())
        sentences = [f"By mean reward on the {HELD_OUT}, against {first}: {parts}."]
        if self.by_method:
            fewest = min(seeds.values())
            if fewest < _ENOUGH_SEEDS:
                sentences.append(f"A method has {fewest} finished seeds: too few.")
        first_run = self.runs[0]
        for run in self.runs:
            done = run.last_iteration
            if done != run.config.iterations:
                sentences.append(f"{run.run} has {done} of {run.config.iterations} iterations.")
            if places := ", ".join(_evaluated_otherwise(first_run, run)):
                sentences.append(
                    f"Figures may not compare ({places}): {run.run} has other prompts or sampling "
                    f"there than {first_run.run}, or an oracle with other settings, files or base "
                    "answers."
                )
            if _has_other_base(first_run, run):
                sentences.append(
                    f"Win rates do not compare: {run.run} and {first_run.run} have other bases."
                )
        return " ".join(sentences)

    def tables(self) -> list[FittedTable]:
        """The tables: methods over seeds, runs, their differences, and their settings."""
        tables = [*self._methods(), *self._runs()]
        if self.differences:
            tables.append(self._differences())
        if self.settings:
            tables.append(self._changed_settings())
        return tables

    def _methods(self) -> Iterator[FittedTable]:
        lines: dict[str, Lines] = {}
        seeds: dict[tuple[str, str], int] = {}
        for figure in self.over_seeds:
            # Another figure may lack a seed.
            place = (figure.evaluation, figure.method)
            number = seeds.setdefault(place, len(figure.values))
            labels = (figure.method, str(number))
            cells = lines.setdefault(figure.evaluation, {}).setdefault(labels, {})
            cells[figure.figure] = figure.shown()
        note = "Mean ± standard deviation over seeds; Student's 95 % intervals of the mean."
        return _tables("Methods over seeds", ["method", "seeds"], lines, note)

    def _runs(self) -> Iterator[FittedTable]:
        lines: dict[str, Lines] = {}
        for run in self.runs:
            for evaluation, row in evaluations(run).items():
                labels = (run.run, self.methods[run.run])
                lines.setdefault(evaluation, {})[labels] = row.cells()
        note = "After the last iteration; 95 % intervals over prompts. Ties lose."
        return _tables("Runs", ["run", "method"], lines, note)

    def _differences(self) -> FittedTable:
        name = "method" if self.by_method else "run"
        rows = []
        for difference in self.differences:
            if difference.figure in _TESTED:
                row = (
                    difference.name,
                    column_of(difference.figure).title,
                    difference.shown(),
                    p_text(difference.adjusted_p_value),
                    difference.evaluation,
                    p_text(difference.estimate.p_value),
                    difference.test,
                )
                rows.append(row)
        return FittedTable(
            f"Differences from {self.differences[0].against}",
            [name, "figure", "difference", "p by Holm", "evaluation", "p", "test"],
            rows,
            left=2,
            note=_OVER_SEEDS if self.by_method else _BY_PROMPT,
        )

    def _changed_settings(self) -> FittedTable:
        rows = []
        for name, changes in self.settings.items():
            for change in changes:
                rows.append([name, change])
        title = f"Settings that differ from {self.runs[0].run}"
        return FittedTable(title, ["method", "setting"], rows, left=2)

    def rows(self) -> dict[str, Sequence[FigureRow]]:
        """Figures by iteration, by the runs' names."""
        return {run.run: run.rows for run in self.runs}


def _tables(
    title: str, header: Sequence[str], lines: dict[str, Lines], note: str
) -> Iterator[FittedTable]:
    """A table of each evaluation."""
    for evaluation, cells in lines.items():
        suite = "" if evaluation == HELD_OUT else "suite "
        yield figures_table(f"{title}, {suite}{evaluation}", header, cells, note)


def compare_summaries(
    runs: Sequence[Summary], labels: Mapping[str, str] | None = None
) -> Comparison:
    """Compares runs after their last iterations; see :class:`Comparison`.

    ``labels`` are the methods' by the runs' names; None tells methods by configurations. UserError
    if a run has no evaluation.
    """
    for run in runs:
        if run.last_iteration == 0:
            raise UserError(
                f"run {run.run} has no evaluation", f"`geb resume {run.run}`, or leave it out"
            )
    methods = labels or method_labels(runs)
    groups = by_figure(runs, methods)
    over_seeds = list(method_figures(groups))
    if all(len(figure.values) < 2 for figure in over_seeds):
        over_seeds = []
    comparison = Comparison(runs, methods, over_seeds, [], _settings(runs, methods))
    first, *others = runs
    # If methods are tested over seeds, what one run has over another says nothing of methods.
    if comparison.by_method:
        return replace(comparison, differences=method_differences(groups, methods[first.run]))
    tests: list[Difference] = []
    for run in others:
        tests += compared(first, run, _TESTED)
    return replace(comparison, differences=adjusted(tests))


def _has_other_base(first: Summary, second: Summary) -> bool:
    """True if two runs start from different policies.

    The seed of a warm start does not count: methods are compared over seeds.
    """
    warm_starts = [run.config.sft.result_fields() for run in (first, second)]
    return (
        (first.config.inputs.warm_start is not None and warm_starts[0] != warm_starts[1])
        or read_other_files(first, second, "base/generate/")
        or read_other_files(first, second, "sft")
    )


def _evaluated_otherwise(first: Summary, second: Summary) -> Iterator[str]:
    """Evaluations that two runs have by other prompts, sampling or oracles.

    For a judge that compares, another base is another oracle.
    """
    others = second.config.parts()
    for suite, part in first.config.parts().items():
        other = others.get(suite, part)
        if (
            _sampling(part) != _sampling(other)
            or part.score.result_fields() != other.score.result_fields()
            or read_other_files(first, second, suite_step_name("base", suite) + "/score/")
            or _prompt_files(first, suite) != _prompt_files(second, suite)
            or (part.score.compares and _has_other_base(first, second))
        ):
            yield suite or HELD_OUT


def _sampling(part: RunConfig) -> dict[str, Any]:
    """Settings by which the responses of an evaluation are sampled and its prompts are read."""
    sampled = part.generate.model_copy(update=part.evaluation.sampling() | {"num_shards": 1})
    return sampled.result_fields() | part.prepare.model_dump(exclude=set(UNUSED_BY_SUITES))


def _prompt_files(run: Summary, suite: str) -> list[str]:
    """Digests of the files of an evaluation's prompts; none if a suite has the run's prompts."""
    step = f"{suite_step_name('base', suite)}/prepare" if suite else "prepare"
    prepared = run.artifacts.get(step)
    inputs = prepared.manifest.inputs if prepared else {}
    return [source.digest for source in inputs.get("test") or inputs.get("train") or ()]


def _settings(runs: Sequence[Summary], methods: Mapping[str, str]) -> dict[str, list[str]]:
    """Settings of each method that differ from the first run's, except name and seed."""
    settings: dict[str, list[str]] = {}
    first = runs[0].config.to_values()
    for run in runs:
        compared_values = run.config.to_values() | {"name": first["name"], "seed": first["seed"]}
        changes = list(differences(first, compared_values))
        if changes:
            settings.setdefault(methods[run.run], changes)
    return settings
