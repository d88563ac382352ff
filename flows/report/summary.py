"""A run's results, iteration by iteration, read from the artifacts that its steps stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from stages.contract.errors import DamagedArtifactError
from stages.contract.registry import ModelRegistry
from stages.contract.store import Artifact, Store
from stages.train.params import TrainParams


@dataclass(frozen=True)
class Column:
    """A figure of each iteration and where it is found."""

    title: str
    stage: str
    file: str
    name: str
    form: str = ".3f"


COLUMNS = (
    Column("mean reward", "evaluate", "metrics.json", "mean_reward"),
    Column("win rate", "evaluate", "metrics.json", "win_rate"),
    Column("distinct-1", "evaluate", "metrics.json", "distinct_1"),
    Column("distinct-2", "evaluate", "metrics.json", "distinct_2"),
    Column("distinct-3", "evaluate", "metrics.json", "distinct_3"),
    Column("distinct-4", "evaluate", "metrics.json", "distinct_4"),
    Column("log π_ref", "evaluate", "metrics.json", "mean_log_pi_ref", ".2f"),
    Column("pairs", "pair", "metrics.json", "pairs", "d"),
    Column("ties", "pair", "metrics.json", "ties", "d"),
    Column("loss", "train", "summary.json", "loss"),
    Column("bonus ratio", "train", "summary.json", "bonus_ratio", ".3g"),
)


@dataclass
class Summary:
    """Results of a run, as far as its artifacts are there.

    Attributes:
        run: Its name.
        config: Its configuration.
        artifacts: Artifacts by the name of their step; steps without one are missing.
        rows: A row per iteration, from `iteration` and the names of `COLUMNS` to values or None;
            row 0 is the base policy.
        checkpoint: Place of the last trained checkpoint.
        registered: What the registry knows of the run's model, line by line.
    """

    run: str
    config: RunConfig
    store: str
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: str | None = None
    registered: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "run": self.run,
            "store": self.store,
            "rows": self.rows,
            "checkpoint": self.checkpoint,
            "registered": self.registered,
            "artifacts": {step: each.address() for step, each in self.artifacts.items()},
        }

    def table(self) -> Table:
        """The table that a run ends with."""
        table = Table(title=f"run {self.run}", title_justify="left", box=None, pad_edge=False)
        table.add_column("iteration", justify="right")
        components = self.components()
        for title in [each.title for each in COLUMNS] + components:
            table.add_column(title, justify="right")
        for row in self.rows:
            cells = [formatted(row.get(each.name), each.form) for each in COLUMNS]
            cells += [formatted(row["components"].get(name), ".3f") for name in components]
            table.add_row("base" if row["iteration"] == 0 else str(row["iteration"]), *cells)
        return table

    def kappa(self) -> str:
        """κ as it was asked for, and where it was calibrated what came out of it by iteration."""
        found = [row["kappa"] for row in self.rows if row.get("kappa") is not None]
        label = kappa_label(self.config.train)
        if self.config.train.target_ratio is None or not (label and found):
            return label
        return f"{label} (κ {', '.join(f'{each:.3g}' for each in found)})"

    def components(self) -> list[str]:
        """Names of the oracle's components, in which it explains its scores."""
        return sorted({name for row in self.rows for name in row["components"]})

    def places(self) -> list[str]:
        """Lines with the places of checkpoint, artifacts and registered models."""
        lines = [f"checkpoint  {self.checkpoint}"] if self.checkpoint else []
        lines += [f"registry    {line}" for line in self.registered]
        return [*lines, f"artifacts   {self.store}/artifacts"]


def kappa_label(train: TrainParams) -> str:
    """κ as it was asked for: `κ 1`, `κ 1, 0.5` by iteration, or `ratio 0.001`; empty for f-DPO."""
    if train.design == "none":
        return ""
    if train.target_ratio is not None:
        return f"ratio {train.target_ratio:g}"
    given = train.kappa_values or (train.kappa_or_default(),)
    return "κ " + ", ".join(f"{each:g}" for each in given)


def summarise(record: RunRecord) -> Summary:
    """Reads a run's results; a step without an artifact leaves its figures out."""
    config = record.config()
    found = Summary(run=record.name, config=config, store=record.store.location)
    for step in record.steps():
        if step.state in ("done", "reused"):
            try:
                artifact = record.store.load(step.stage, step.key)
            except DamagedArtifactError:
                continue
            if artifact is not None:
                found.artifacts[step.step] = artifact
    for iteration in range(config.iterations + 1):
        found.rows.append(_row(found.artifacts, iteration))
    trained = [found.artifacts.get(f"iteration-{t}/train") for t in range(1, config.iterations + 1)]
    done = [each for each in trained if each is not None]
    found.checkpoint = done[-1].address("checkpoint") if done else None
    found.registered = _registered(record.store, config.model or config.name)
    return found


def _registered(store: Store, model: str) -> list[str]:
    registry = ModelRegistry(store)
    if model not in registry.names():
        return []
    steps = {each.version: each.step for each in registry.versions(model)}
    return [
        f"{model}@{alias.alias} is version {alias.version} ({steps[alias.version]})"
        for alias in registry.aliases(model)
    ]


def _row(artifacts: dict[str, Artifact], iteration: int) -> dict[str, Any]:
    row: dict[str, Any] = {"iteration": iteration, "components": {}}
    if iteration == 0:
        # Every evaluation repeats the base's figures beside the policy's own.
        metrics = _json(artifacts.get("iteration-1/evaluate"), "metrics.json")
        row |= {each.name: metrics.get(f"base_{each.name}") for each in COLUMNS}
        row["components"] = metrics.get("base_reward_components", {})
        return row
    for each in COLUMNS:
        values = _json(artifacts.get(f"iteration-{iteration}/{each.stage}"), each.file)
        row[each.name] = values.get(each.name, values.get("metrics", {}).get(each.name))
    row["kappa"] = _json(artifacts.get(f"iteration-{iteration}/train"), "summary.json").get("kappa")
    evaluated = _json(artifacts.get(f"iteration-{iteration}/evaluate"), "metrics.json")
    row["components"] = evaluated.get("reward_components", {})
    return row


def _json(artifact: Artifact | None, name: str) -> dict[str, Any]:
    if artifact is None:
        return {}
    loaded = json.loads(artifact.file(name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def formatted(value: Any, form: str) -> str:
    """A figure for a person; a dash where there is none."""
    return "-" if value is None else format(value, form)
