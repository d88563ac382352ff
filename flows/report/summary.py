"""A run's results, iteration by iteration, read from the artifacts of its steps."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow.parquet as pq

from flows.execution.run_record import DamagedRecordWarning, RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.step import step_name
from flows.report.status import DONE, RunStatus, run_status
from flows.report.table import BASE, POLICY, FigureRow, FittedTable, Lines, figures_table
from stages.contract.errors import DamagedArtifactError
from stages.evaluate.statistics import Estimate
from stages.store.base import Artifact, Store
from stages.store.registry import ModelRegistry
from stages.train.params import TrainParams

# Figures of the stages `pair` and `train`, without a bonus and with one.
_TRAINING_FIGURES = ("pairs", "ties", "loss")
_BONUS_FIGURES = (*_TRAINING_FIGURES, "bonus_ratio", "kappa")


@dataclass
class Summary:
    """Results of a run, as far as its artifacts are there.

    Attributes:
        artifacts: Artifacts by the name of their step; steps without one are missing.
        rows: Figures after each iteration, as far as they are known; row 0 is the base policy.
        checkpoint: Place of the last trained checkpoint.
        registered: What the registry knows of the run's model, line by line.
        suites: Rows of the suites that have results: the base's, and one for each iteration.
        status: How far the run is, and which of its steps failed.
        damaged: The damage of each damaged artifact, whose figures are missing.
    """

    run: str
    config: RunConfig
    store: str
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    rows: list[FigureRow] = field(default_factory=list)
    checkpoint: str | None = None
    registered: list[str] = field(default_factory=list)
    suites: dict[str, list[FigureRow]] = field(default_factory=dict)
    status: RunStatus | None = None
    damaged: list[str] = field(default_factory=list)

    @property
    def last_iteration(self) -> int:
        """The last iteration that has an evaluation on held-out prompts; 0 without any."""
        evaluated = [row.iteration for row in self.rows if "mean_reward" in row.figures]
        return max(evaluated, default=0)

    def artifact(self, iteration: int, part: str, suite: str = "") -> Artifact | None:
        """Artifact of a step of an iteration, if the step has one."""
        return self.artifacts.get(step_name(iteration, part, suite))

    def made(self, part: str, suite: str = "") -> dict[int, Artifact]:
        """Artifacts of a step by the iterations that have one."""
        artifacts = {}
        for iteration in range(1, self.config.iterations + 1):
            artifact = self.artifact(iteration, part, suite)
            if artifact is not None:
                artifacts[iteration] = artifact
        return artifacts

    def last(self, part: str, suite: str = "") -> Artifact | None:
        """Artifact of a step in the last iteration that has one."""
        return next(reversed(self.made(part, suite).values()), None)

    def read_json(self, iteration: int, part: str, path: str) -> dict[str, Any]:
        """Content of a JSON file of a step's artifact; empty if the step has none."""
        artifact = self.artifact(iteration, part)
        return {} if artifact is None else artifact.read_json(path)

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        suites = {}
        for name, rows in self.suites.items():
            suites[name] = [asdict(row) for row in rows]
        return {
            "run": self.run,
            "store": self.store,
            "rows": [asdict(row) for row in self.rows],
            "suites": suites,
            "checkpoint": self.checkpoint,
            "registered": self.registered,
            "damaged": self.damaged,
            "artifacts": {step: artifact.address() for step, artifact in self.artifacts.items()},
        }

    def tables(self) -> list[FittedTable]:
        """The tables that a run ends with: its own, and one for each suite."""
        tables = [_table(f"run {self.run}", self.rows)]
        for name, rows in self.suites.items():
            tables.append(_table(f"suite {name}", rows))
        return tables

    def places(self) -> list[str]:
        """Lines with the places of checkpoint, artifacts and registered models."""
        lines = [f"checkpoint  {self.checkpoint}"] if self.checkpoint else []
        lines += [f"registry    {line}" for line in self.registered]
        return [*lines, f"artifacts   {self.store}/artifacts"]


def _table(title: str, rows: Sequence[FigureRow]) -> FittedTable:
    lines: Lines = {}
    for row in rows:
        lines[str(row.iteration or BASE),] = row.cells()
    return figures_table(title, ["iteration"], lines)


def kappa_label(train: TrainParams) -> str:
    """κ as it was set: `κ 1` or `ratio 0.001`; empty for f-DPO."""
    if not train.has_bonus:
        return ""
    if train.target_ratio is not None:
        return f"ratio {train.target_ratio:g}"
    return f"κ {train.kappa_or_default():g}"


def summarise(record: RunRecord) -> Summary:
    """Reads a run's results; a step without an artifact leaves its figures out.

    A damaged artifact is left out as well, with a warning.
    """
    config = record.config()
    store = record.store
    status = run_status(record)
    summary = Summary(record.name, config, store.location, status=status)
    for step in record.steps():
        if step.state in DONE:
            try:
                artifact = store.load(step.stage, step.key)
            except DamagedArtifactError as error:
                damage = f"{step.step}: {error}"
                summary.damaged.append(damage)
                warnings.warn(DamagedRecordWarning(damage), stacklevel=2)
                continue
            if artifact is not None:
                summary.artifacts[step.step] = artifact
    for iteration in range(config.iterations + 1):
        summary.rows.append(iteration_row(summary, iteration))
    for name in config.suites:
        rows = suite_rows(summary, name)
        if rows:
            summary.suites[name] = rows
    trained = summary.last("train")
    if trained is not None:
        summary.checkpoint = trained.address("checkpoint")
    summary.registered = _registered(store, config.model or config.name)
    return summary


def _registered(store: Store, model: str) -> list[str]:
    registry = ModelRegistry(store)
    steps = {version.version: version.step for version in registry.versions(model)}
    lines = []
    for alias, moves in registry.aliases(model).items():
        number = moves[-1].version
        step = steps.get(number, "gone")
        lines.append(f"{model}@{alias} is version {number} ({step})")
    return lines


def iteration_row(summary: Summary, iteration: int) -> FigureRow:
    """Figures of one iteration for :attr:`Summary.rows`; 0 is the base policy."""
    # Every evaluation repeats the base's figures next to the policy's.
    evaluations = summary.made("evaluate")
    evaluated = evaluations.get(iteration or min(evaluations, default=1))
    row = evaluated_row(evaluated, iteration)
    if iteration == 0:
        return row
    paired = summary.read_json(iteration, "pair", "metrics.json")
    trained = summary.read_json(iteration, "train", "summary.json")
    # κ is the last step's; `metrics` has means of the last epoch.
    metrics = trained.get("metrics", {}) | paired | {"kappa": trained.get("kappa")}
    for name in _BONUS_FIGURES if summary.config.train.has_bonus else _TRAINING_FIGURES:
        if metrics.get(name) is not None:
            row.figures[name] = Estimate(metrics[name])
    return row


def suite_rows(summary: Summary, name: str) -> list[FigureRow]:
    """Rows of a suite: the base's, and one for each iteration that has results."""
    rows: list[FigureRow] = []
    for iteration, evaluated in summary.made("evaluate", name).items():
        if not rows:
            rows.append(evaluated_row(evaluated, 0))
        rows.append(evaluated_row(evaluated, iteration))
    return rows


def evaluated_row(evaluated: Artifact | None, iteration: int) -> FigureRow:
    """Figures of the policy in an evaluation, or for iteration 0 of the base."""
    row = FigureRow(iteration)
    if evaluated is not None:
        model = POLICY if iteration else BASE
        for line in pq.read_table(evaluated.file("figures.parquet")).to_pylist():
            if line["model"] == model:
                estimate = Estimate(line["value"], line["low"], line["high"])
                row.figures[line["figure"]] = estimate
    return row
