"""Building blocks of a study: cells from a table, their runs, and the figures of finished runs.

A cell is a row of a CSV file: a method under a divergence in a setting. Its runs start from a
preset. Runs that several cells ask for have one name, and are computed once. docs/research.md has
the steps of a custom study.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from flows.execution.plan import plan
from flows.execution.run_record import RunRecord
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.external import External
from flows.pipeline.grid import Cell, cells, parse_axes
from flows.pipeline.loading import merged, with_fields
from flows.pipeline.presets import configured, laid_over
from flows.pipeline.step import Output, Source, Step
from flows.report.summary import Summary, last_iteration, summarise
from stages.contract.digests import sha256_of
from stages.contract.errors import UserError
from stages.contract.request import FileInput, key_fields
from stages.evaluate.summary import LONGEST_NGRAM, DistinctCounter
from stages.store.opening import open_store
from stages.tables.schemas import RESPONSES, read_batches


def training_log_pi_ref(run: Summary) -> list[float]:
    """Log π_ref of the responses that the last iteration trained on, chosen and rejected.

    π_ref is what that training measured against (``train.reference``).
    """
    trained = run.last("train")
    if trained is None:
        return []
    table = pq.read_table(trained.file("reference_logprobs.parquet"))
    chosen = table["chosen_logprobs"].to_pylist()
    rejected = table["rejected_logprobs"].to_pylist()
    return [sum(logprobs) for logprobs in (*chosen, *rejected)]


KINDS = ("experiment", "setting", "method", "divergence")


@dataclass(frozen=True)
class Row:
    """One cell of a study."""

    experiment: str
    """The table or figure that it belongs to, such as ``main``."""
    setting: str
    """The model, or the task."""
    method: str
    """``f-DPO``, ``GEB-π``, …"""
    divergence: str
    """``KL``, ``Hellinger`` or ``forward KL``."""
    configuration: str
    """Preset that its runs start from."""
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values by field that differ from the preset."""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict, hash=False)
    """One coefficient and the values among which it is chosen; empty if it is given."""
    tuning_seeds: tuple[int, ...] = ()
    """Seeds of the runs by which it is chosen; they are not reported."""
    seeds: tuple[int, ...] = ()
    """Seeds of the runs that are reported."""
    prefix: str = "study"
    """Name of the study, with which the names of its runs begin."""
    sections: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Laid over the preset besides; the names of runs do not show them."""

    def names(self) -> tuple[str, str, str, str]:
        """Experiment, setting, method and divergence."""
        return self.experiment, self.setting, self.method, self.divergence

    def coefficients(self) -> list[dict[str, Any]]:
        """Each value of the grid as the field that it sets; one empty one without a grid."""
        return [{name: value} for name, values in self.grid.items() for value in values] or [{}]


@dataclass(frozen=True)
class StudyRun:
    """One run of a study's cell."""

    row: Row
    cell: Cell
    """Its configuration, under the run's name."""
    coefficient: Mapping[str, Any] = field(hash=False)
    """The value of the row's grid that it has."""
    tunes: bool = False
    """True for a run that serves the choice of the coefficient, and is not reported."""
    summary: Summary | None = field(default=None, hash=False)
    """Its results once it is finished; see :func:`finished`."""

    @property
    def name(self) -> str:
        """Name of the run in the store."""
        return self.cell.config.name

    def figures(self, suite: str | None = None) -> Mapping[str, Any]:
        """Figures of the last evaluated iteration; none before it, or if a suite was not run."""
        if self.summary is None:
            return {}
        if suite is None:
            last = last_iteration(self.summary)
            return {} if last is None else self.summary.rows[last]
        rows = self.summary.suites.get(suite)
        return rows[-1] if rows else {}

    @cached_property
    def training_figures(self) -> Mapping[str, float | None]:
        """Distinct-n of the responses that the last iteration sampled for training."""
        counter = DistinctCounter(LONGEST_NGRAM)
        place = f"iteration-{self.cell.config.iterations}/generate/"
        artifacts = self.summary.artifacts if self.summary else {}
        for step, artifact in artifacts.items():
            if step.startswith(place):
                for batch in read_batches(
                    artifact.file("responses.parquet"), RESPONSES, columns=["response"]
                ):
                    counter.add(batch["response"].to_pylist())
        return {f"distinct_{n}": share for n, share in enumerate(counter.per_ngram(), 1)}


def read_rows(table: Path, only: Sequence[str] = (), prefix: str = "study") -> list[Row]:
    """The cells of a table.

    Args:
        table: A CSV file with a column for each field of :class:`Row` but the prefix.
        only: Experiments, settings, methods and divergences to keep; all if empty. Of several
            names of one kind each is kept, of different kinds what has both.
        prefix: Name of the study, with which the names of its runs begin.

    Raises:
        UserError: No cell has the names of ``only``, or a row cannot be read.
    """
    with table.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    rows = [_row(values, prefix, f"{table}:{line}") for line, values in enumerate(lines, 2)]
    kept = rows
    missing = set(only)
    for kind in KINDS:
        names = {getattr(row, kind) for row in rows}.intersection(only)
        missing -= names
        kept = [row for row in kept if not names or getattr(row, kind) in names]
    if missing or not kept:
        names = {name for row in rows for name in row.names()}
        raise UserError(
            f"no cell has {' and '.join(map(repr, sorted(missing) or only))}",
            f"name one, or several that a cell has, of: {', '.join(sorted(names))}",
        )
    return kept


def _row(values: Mapping[str, str], prefix: str, place: str) -> Row:
    try:
        fields = parse_axes(axis for axis in values["fields"].split(";") if axis.strip())
        row = Row(
            experiment=values["experiment"],
            setting=values["setting"],
            method=values["method"],
            divergence=values["divergence"],
            configuration=values["configuration"],
            fields={name: value for name, [value] in fields.items()},
            grid=parse_axes([values["grid"]] if values["grid"] else []),
            tuning_seeds=tuple(map(int, values["tuning_seeds"].split())),
            seeds=tuple(map(int, values["seeds"].split())),
            prefix=prefix,
        )
    except (KeyError, ValueError, AttributeError) as error:
        raise UserError(
            f"{place} is not a cell: {error}", "compare it with the other rows"
        ) from error
    if bool(row.grid) != bool(row.tuning_seeds):
        raise UserError(f"{place}: a grid needs tuning seeds, and they need a grid", "give both")
    return row


def listed(fields: Mapping[str, Any]) -> str:
    """Fields as a person reads them: ``train.kappa=0.5, train.beta=1``."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def tuning_runs(
    rows: Iterable[Row], overrides: Mapping[str, Any], most_seeds: int | None = None
) -> list[StudyRun]:
    """Runs by which coefficients are chosen: every value of a grid under every tuning seed.

    Args:
        rows: The cells.
        overrides: Sections and fields laid over every configuration, such as the store.
        most_seeds: Number of seeds of each cell to keep, the first ones; all if None.

    Raises:
        UserError: A configuration is wrong.
    """
    runs: list[StudyRun] = []
    for row in rows:
        if row.grid:
            seeds = row.tuning_seeds[:most_seeds]
            for coefficient in row.coefficients():
                runs += _runs(row, coefficient, seeds, overrides, tunes=True)
    return runs


def reported_runs(
    rows: Iterable[Row],
    overrides: Mapping[str, Any],
    chosen: Mapping[Row, Mapping[str, Any]],
    most_seeds: int | None = None,
) -> list[StudyRun]:
    """Runs that are reported; see :func:`tuning_runs`.

    A row without seeds has no runs, nor has one with a grid before its coefficient is in
    ``chosen``.
    """
    runs: list[StudyRun] = []
    for row in rows:
        if row.seeds and (not row.grid or row in chosen):
            seeds = row.seeds[:most_seeds]
            runs += _runs(row, chosen.get(row, {}), seeds, overrides, tunes=False)
    return runs


def _runs(
    row: Row,
    coefficient: Mapping[str, Any],
    seeds: Sequence[int],
    overrides: Mapping[str, Any],
    *,
    tunes: bool,
) -> list[StudyRun]:
    config = configured(row.configuration, merged(row.sections, laid_over(overrides)))
    axes = {name: [value] for name, value in {**row.fields, **coefficient}.items()}
    planned = cells(f"{row.prefix}-{row.configuration}", config, axes, seeds)
    return [StudyRun(row, cell, coefficient, tunes) for cell in planned]


def choose(runs: Iterable[StudyRun], measured: Mapping[str, float]) -> dict[Row, Mapping[str, Any]]:
    """The coefficient of each row: the one with the highest mean over the tuning seeds.

    ``measured`` has values by the run's name. Ties go to the preset's own value, else to the one
    that stands first in the row. A row none of whose runs was measured has no coefficient; a value
    whose runs were measured in part has the mean of that part.
    """
    groups: dict[Row, dict[str, list[StudyRun]]] = {}
    for run in runs:
        if run.name in measured:
            groups.setdefault(run.row, {}).setdefault(str(run.coefficient), []).append(run)

    def rank(group: Sequence[StudyRun]) -> tuple[float, bool]:
        return fmean(measured[run.name] for run in group), _is_preset(group[0])

    return {row: max(values.values(), key=rank)[0].coefficient for row, values in groups.items()}


def mean_rewards(runs: Iterable[StudyRun]) -> dict[str, float]:
    """Mean rewards of the last iteration by the runs' names; runs without figures are left out."""
    return {run.name: run.figures()["mean_reward"] for run in runs if run.figures()}


def _is_preset(run: StudyRun) -> bool:
    row = run.row
    preset = with_fields(configured(row.configuration, {}), row.fields, row.configuration)
    return with_fields(preset, run.coefficient, row.configuration) == preset


def finished(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Those whose every step the store has under today's key, with their results.

    A run that several cells ask for is in each.
    """
    summaries: dict[str, Summary] = {}
    for name, config in {run.name: run.cell.config for run in runs}.items():
        record = RunRecord(open_store(config.store, create=True), name)
        if (record.path / "config.json").exists():
            done = (step for step in record.steps() if step.state in ("done", "reused"))
            keys = {step.step: step.key for step in done}
            lines = plan(resolve_run(config))
            if all(line.action == "reuse" and keys.get(line.step) == line.key for line in lines):
                summaries[name] = summarise(record, config)
    return [replace(run, summary=summaries[run.name]) for run in runs if run.name in summaries]


def identities(steps: Sequence[Step]) -> Iterator[str]:
    """An identity for each step: what its key would be, were its inputs there."""
    by_step: dict[str, str] = {}

    def identified(source: Source) -> External:
        if not isinstance(source, Output):
            return source
        return FileInput(location="", digest=f"{by_step[source.step]}/{source.path}")

    for step in steps:
        inputs = {name: list(map(identified, group)) for name, group in step.inputs.items()}
        by_step[step.name] = sha256_of(key_fields(step.params, step.seed, inputs))
        yield by_step[step.name]
