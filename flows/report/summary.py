"""A run's results, iteration by iteration, read from the artifacts of its steps."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.execution.run_record import DamagedRecordWarning, RunRecord
from flows.pipeline.config import Evaluation, RunConfig
from flows.pipeline.steps import suite_place
from flows.report.status import RunStatus, run_status
from flows.report.table import (
    BASE,
    COLUMNS,
    POLICY,
    SUITE_COLUMNS,
    Column,
    Figures,
    FittedTable,
    Model,
    SuiteFigures,
)
from stages.contract.errors import DamagedArtifactError
from stages.store.base import Artifact, Store
from stages.store.registry import ModelRegistry
from stages.train.params import TrainParams


@dataclass
class Summary(Figures):
    """Results of a run, as far as its artifacts are there.

    Attributes:
        artifacts: Artifacts by the name of their step; steps without one are missing.
        rows: A row per iteration, from `iteration` and the names of `COLUMNS` to values or None,
            with `components` of the oracle, `solved` (accuracy, pass@k, length-controlled win
            rate, perplexity), and `intervals` by the names of
            :meth:`flows.report.prompt_figures.Samples.figures`; row 0 is the base policy.
        checkpoint: Place of the last trained checkpoint.
        registered: What the registry knows of the run's model, line by line.
        suites: Figures of the suites that have results.
        status: How far the run is, and which of its steps failed.
        damaged: The damage of each damaged artifact, whose figures are missing.
    """

    run: str
    config: RunConfig
    store: str
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: str | None = None
    registered: list[str] = field(default_factory=list)
    suites: list[SuiteFigures] = field(default_factory=list)
    status: RunStatus | None = None
    damaged: list[str] = field(default_factory=list)
    columns: Sequence[Column] = COLUMNS

    def made(self, stage: str) -> list[tuple[int, Artifact]]:
        """Artifacts of a stage, with the iterations that have one."""
        found = (
            (t, self.artifacts.get(f"iteration-{t}/{stage}"))
            for t in range(1, self.config.iterations + 1)
        )
        return [(t, artifact) for t, artifact in found if artifact is not None]

    def last(self, stage: str) -> Artifact | None:
        """Artifact of a stage in the last iteration that has one."""
        return next((artifact for _, artifact in reversed(self.made(stage))), None)

    def read_json(self, step: str, path: str) -> dict[str, Any]:
        """Content of a JSON file of a step's artifact; empty if the step has none."""
        artifact = self.artifacts.get(step)
        return {} if artifact is None else artifact.read_json(path)

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "run": self.run,
            "store": self.store,
            "rows": self.rows,
            "suites": {each.name: each.rows for each in self.suites},
            "checkpoint": self.checkpoint,
            "registered": self.registered,
            "damaged": self.damaged,
            "artifacts": {step: each.address() for step, each in self.artifacts.items()},
        }

    def tables(self) -> list[FittedTable]:
        """The tables that a run ends with: its own, and one for each suite."""
        suites = [each.table(f"suite {each.name}") for each in self.suites]
        return [self.table(f"run {self.run}"), *suites]

    def kappa(self) -> str:
        """κ as it was asked for, and if it was calibrated what came out of it by iteration."""
        found = [row["kappa"] for row in self.rows if row.get("kappa") is not None]
        label = kappa_label(self.config.train)
        if self.config.train.target_ratio is None or not (label and found):
            return label
        return f"{label} (κ {', '.join(f'{each:.3g}' for each in found)})"

    def places(self) -> list[str]:
        """Lines with the places of checkpoint, artifacts and registered models."""
        lines = [f"checkpoint  {self.checkpoint}"] if self.checkpoint else []
        lines += [f"registry    {line}" for line in self.registered]
        return [*lines, f"artifacts   {self.store}/artifacts"]


def last_iteration(run: Summary) -> int | None:
    """The last iteration that has an evaluation on held-out prompts."""
    done = [row["iteration"] for row in run.rows[1:] if row.get("mean_reward") is not None]
    return done[-1] if done else None


def kappa_label(train: TrainParams) -> str:
    """κ as it was asked for: `κ 1`, `κ 1, 0.5` by iteration, or `ratio 0.001`; empty for f-DPO."""
    if not train.has_bonus:
        return ""
    if train.target_ratio is not None:
        return f"ratio {train.target_ratio:g}"
    given = train.kappa_values or (train.kappa_or_default(),)
    return "κ " + ", ".join(f"{each:g}" for each in given)


def summarise(record: RunRecord, config: RunConfig | None = None) -> Summary:
    """Reads a run's results; a step without an artifact leaves its figures out.

    A damaged artifact is left out as well, with a warning. Unset, ``config`` is the run's own.
    """
    config = config or record.config()
    found = Summary(run=record.name, config=config, store=record.store.location)
    found.status = run_status(record)
    for step in record.steps():
        if step.state in ("done", "reused"):
            try:
                artifact = record.store.load(step.stage, step.key)
            except DamagedArtifactError as error:
                found.damaged.append(f"{step.step}: {error}")
                warnings.warn(DamagedRecordWarning(f"{step.step}: {error}"), stacklevel=2)
                continue
            if artifact is not None:
                found.artifacts[step.step] = artifact
    for iteration in range(config.iterations + 1):
        found.rows.append(iteration_row(found, iteration))
    for name in config.suites:
        rows = suite_rows(found, name)
        found.suites += [SuiteFigures(name, rows)] if rows else []
    trained = found.last("train")
    found.checkpoint = trained.address("checkpoint") if trained else None
    found.registered = _registered(record.store, config.model or config.name)
    return found


def _registered(store: Store, model: str) -> list[str]:
    registry = ModelRegistry(store)
    if model not in registry.names():
        return []
    steps = {each.version: each.step for each in registry.versions(model)}
    return [
        f"{model}@{alias.alias} is version {alias.version} ({steps.get(alias.version, 'gone')})"
        for alias in registry.aliases(model)
    ]


def iteration_row(found: Summary, iteration: int) -> dict[str, Any]:
    """Figures of one iteration for :attr:`Summary.rows`; 0 is the base policy."""
    # Every evaluation repeats the base's figures next to the policy's.
    place = f"iteration-{iteration or 1}/evaluate"
    sampled = [each for each in COLUMNS if each.stage == "evaluate"]
    row: dict[str, Any] = dict.fromkeys([each.name for each in COLUMNS])
    prefix, model = (place, POLICY) if iteration else ("base", BASE)
    evaluation = found.config.evaluation
    row |= evaluated_row(found.artifacts, evaluation, sampled, place, prefix, model)
    row["iteration"] = iteration
    if iteration == 0:
        return row
    paired = found.read_json(f"iteration-{iteration}/pair", "metrics.json")
    trained = found.read_json(f"iteration-{iteration}/train", "summary.json")
    own = {"pair": paired, "train": trained.get("metrics", {})}
    row |= {each.name: own[each.stage].get(each.name) for each in COLUMNS if each.stage in own}
    return row | {"kappa": trained.get("kappa")}


def suite_rows(found: Summary, name: str) -> list[dict[str, Any]]:
    """Rows of a suite: the base's, and one for each iteration that has results."""
    places = {
        t: suite_place(f"iteration-{t}/evaluate", name)
        for t in range(1, found.config.iterations + 1)
    }
    done = [(t, place) for t, place in places.items() if place in found.artifacts]
    models = [(0, place, suite_place("base", name), BASE) for _, place in done[:1]]
    models += [(t, place, place, POLICY) for t, place in done]
    suite = found.config.for_suite(name).evaluation
    return [
        {"iteration": t}
        | evaluated_row(found.artifacts, suite, SUITE_COLUMNS, place, prefix, model)
        for t, place, prefix, model in models
    ]


def evaluated_row(
    artifacts: Mapping[str, Artifact],
    evaluation: Evaluation,
    columns: Sequence[Column],
    step: str,
    prefix: str,
    model: Model,
) -> dict[str, Any]:
    """Figures of one model in an evaluation: metrics, components, solved problems, intervals.

    ``step`` is the evaluation's; ``prefix`` begins the names of the steps that sampled and scored
    the model's responses.
    """
    if step not in artifacts:
        unknown = {each.name: None for each in columns}
        return {**unknown, "components": {}, "solved": {}, "intervals": {}}
    # Here, since scipy takes a second to load, and most commands do without it.
    from flows.report.prompt_figures import Samples, estimates, length_controlled

    metrics = artifacts[step].read_json("metrics.json")
    own = "base_" if model == BASE else ""
    samples = Samples.of(artifacts, evaluation, step, prefix, model)
    controlled = length_controlled(metrics, model)
    figures = {**estimates(samples), **controlled}
    of_some = (*samples.solved(), *controlled)
    solved = {name: figures[name].value for name in of_some if name in figures}
    if f"{own}perplexity" in metrics:
        solved["perplexity"] = metrics[f"{own}perplexity"]
    log_pi, log_pi_ref = (metrics.get(each) for each in ("mean_log_pi", "mean_log_pi_ref"))
    moved = None
    if model == POLICY and log_pi is not None and log_pi_ref is not None:
        moved = log_pi - log_pi_ref
    return {
        **{each.name: metrics.get(f"{own}{each.name}") for each in columns},
        "kl_to_base": moved,
        "components": metrics.get(f"{own}reward_components", {}),
        "solved": solved,
        "intervals": {name: list(each.interval) for name, each in figures.items() if each.interval},
    }
