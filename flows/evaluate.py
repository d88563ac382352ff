"""The flow `evaluate`: two models compared on held-out prompts, generate → score → evaluate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run
from prefect.states import State

from flows.execution.cancellation import ends_cancelled
from flows.execution.hooks import remove_containers
from flows.execution.outage import survives_outage
from flows.execution.prefect_progress import artifact_key
from flows.execution.prefect_tasks import StepTasks, step_tasks
from flows.execution.step_executor import StepExecutor
from flows.iterate import NOTHING, Overrides, Preset
from flows.pipeline.algorithm import sample_and_score
from flows.pipeline.config import RunConfig
from flows.pipeline.inputs import (
    External,
    require_oracle_inputs,
    resolve,
    resolve_inputs,
    resolve_model,
    suite_inputs,
)
from flows.pipeline.presets import DEFAULT_PRESET, NO_PRESET, configured
from flows.pipeline.steps import Steps
from flows.report.failure import failed
from flows.report.fitting import FittedTable
from flows.report.prompt_figures import estimates, places
from flows.report.solved import Solved, length_controlled, solved_names
from flows.report.statistics import Estimate
from flows.report.table import Cell, formatted, interval_text
from stages.contract.errors import GebError, RunCancelledError, UserError
from stages.contract.store import Artifact, Store
from stages.contract.stores import open_store

# What of the metrics is shown for both models; `metrics.json` has the rest.
_SHOWN = (
    # The base is what the policy wins against; it has neither of the first two.
    ("win rate", "win_rate", ".3f"),
    ("tied prompts", "tied_prompts", "d"),
    ("mean reward", "mean_reward", ".3f"),
    ("distinct-1", "distinct_1", ".3f"),
    ("distinct-4", "distinct_4", ".3f"),
    ("log π_ref", "mean_log_pi_ref", ".2f"),
    ("tokens of a response", "mean_response_tokens", ".1f"),
    ("share cut off", "truncated_share", ".3f"),
)


@dataclass(frozen=True)
class Models:
    """The two models and the prompts, as a person names them.

    Attributes:
        policy: A registered model (``name``, ``name@alias``, ``name:version``), a checkpoint
            folder, or a hub id.
        base: The same, for the model that it is compared with; None for the one that the
            configuration starts from.
        prompts: File or hub data set of prompts; None for those that the configuration holds out,
            or the suite's.
        suite: Suite of the configuration whose prompts, sampling and oracle are used; None for the
            evaluation on held-out prompts.
    """

    policy: str
    base: str | None = None
    prompts: str | None = None
    suite: str | None = None


@dataclass
class Comparison:
    """Result of an evaluation."""

    models: Models
    artifact: str
    """Address of the artifact with its metrics."""
    metrics: dict[str, Any] = field(default_factory=dict)
    estimates: dict[str, Mapping[str, Estimate]] = field(default_factory=dict)
    """Figures with their intervals, by `policy` and `base`."""
    solved: tuple[str, ...] = ()
    """Names of those among them that only some evaluations have."""
    responses: tuple[Path, ...] = ()
    """The policy's responses, shard by shard."""
    scores: tuple[Path, ...] = ()
    """Their scores."""

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            **vars(self.models),
            "artifact": self.artifact,
            "metrics": self.metrics,
            "estimates": {
                model: {name: vars(each) for name, each in found.items()}
                for model, found in self.estimates.items()
            },
        }

    def rows(self) -> list[dict[str, str]]:
        """A row per figure, for a person: the policy's and the base's."""
        base = self.models.base or "the configuration's policy"
        rows = [{"": "model", "policy": self.models.policy, "base": base}]
        rows += [self._row(title, name, form) for title, name, form in _SHOWN]
        return rows + [self._row(name, name, ".3f") for name in self.solved]

    def _row(self, title: str, name: str, form: str) -> dict[str, str]:
        row = {"": title}
        for model, prefix in (("policy", ""), ("base", "base_")):
            estimate = self.estimates.get(model, {}).get(name)
            value = self.metrics.get(f"{prefix}{name}", estimate.value if estimate else None)
            interval = interval_text(estimate.interval if estimate else None, form)
            row[model] = str(Cell(formatted(value, form), interval))
        return row

    def table(self) -> FittedTable:
        """The table that an evaluation ends with."""
        rows = self.rows()
        return FittedTable("", list(rows[0]), [list(row.values()) for row in rows], kept=3, left=3)


def _flow_run_name() -> str:
    base = flow_run.parameters["base"] or "base"
    return f"{flow_run.parameters['policy']} against {base}"


@flow(
    name="evaluate",
    flow_run_name=_flow_run_name,
    persist_result=False,
    on_cancellation=[remove_containers],
    on_crashed=[remove_containers],
)
@ends_cancelled
def evaluate(
    policy: str,
    base: str = "",
    prompts: str = "",
    suite: str = "",
    preset: Preset = DEFAULT_PRESET,
    config: Overrides = NOTHING,
) -> Comparison | State[Any]:
    """Compares a model with a base: both answer the same prompts, and the oracle scores them.

    Args:
        policy: A registered model (`name`, `name@alias` or `name:version`), a checkpoint folder,
            or a hub id.
        base: The model to compare with; empty takes the one that the configuration starts from.
        prompts: File or hub data set of prompts; empty takes those that the configuration holds
            out.
        suite: Suite of the configuration whose prompts, sampling and oracle are used; empty takes
            the evaluation on held-out prompts.
        preset: The configuration whose sampling, oracle and metrics are used.
        config: What is to differ from the preset. An empty field takes the preset's value, or the
            default where the preset has none.
    """
    asked: RunConfig | None = None
    try:
        asked = configured(preset, config)
        asked = asked.model_copy(update={"name": f"{asked.name}-evaluation"})
        return _evaluate(asked, Models(policy, base or None, prompts or None, suite or None))
    except RunCancelledError:
        raise
    except GebError as error:
        return failed(error, asked.name if asked else f"{preset}-evaluation")


def evaluate_resolved(config: RunConfig, models: Models) -> Comparison:
    """Calls the flow with a configuration that was read already, for programs.

    Observers are those of the present block.

    Raises:
        GebError: The evaluation failed.
    """
    whole = json.loads(config.to_json())
    places = models.base or "", models.prompts or "", models.suite or ""
    return evaluate(models.policy, *places, NO_PRESET, whole)


def num_steps(config: RunConfig, suite: str | None) -> int:
    """Steps of an evaluation: prompts, both models' samples and their scores, and the metrics.

    Raises:
        UserError: There is no such suite.
    """
    evaluation = config.for_suite(suite).evaluation if suite else config.evaluation
    return 2 + 4 * evaluation.num_shards


def _evaluate(config: RunConfig, models: Models) -> Comparison:
    store = open_store(config.store, create=True)
    external = _external(config, models, store)
    if models.suite is not None:
        config = config.for_suite(models.suite)
    elif models.prompts is not None:
        config = config.model_copy(update={"iterations": 0})
    with step_tasks(StepExecutor(config)) as tasks:
        _compare(config, external, tasks)
        artifacts = tasks.wait()
    found = _comparison(config, models, artifacts)
    survives_outage(create_table_artifact)(
        found.rows(),
        key=artifact_key(config.name),
        description=f"{models.policy} against {models.base or 'the base'}: {found.artifact}",
    )
    return found


def _external(config: RunConfig, models: Models, store: Store) -> dict[str, list[External]]:
    base = models.base or config.inputs.policy
    if base is None:
        raise UserError(
            "there is no model to compare with: the configuration warm-starts its own",
            "name one as the base, for example a first version (`quickstart:1`)",
        )
    if models.suite is not None:
        external = _of_suite(config, models.suite, models.prompts)
    elif models.prompts is None:
        external = resolve_inputs(config)
    else:
        require_oracle_inputs(config)
        held_out = [resolve(models.prompts, "dataset")]
        external = {"prompts": [], "test_prompts": held_out, **_oracle_inputs(config)}
    return {
        **external,
        "policy": [resolve_model(models.policy, store)],
        "base": [resolve_model(base, store)],
    }


def _of_suite(config: RunConfig, suite: str, prompts: str | None) -> dict[str, list[External]]:
    if config.for_suite(suite).suites[suite].score is None:
        require_oracle_inputs(config)
    found = suite_inputs(config, suite, _oracle_inputs(config))
    return found | ({"test_prompts": [resolve(prompts, "dataset")]} if prompts else {})


def _oracle_inputs(config: RunConfig) -> dict[str, list[External]]:
    inputs = config.inputs
    return {
        "oracle_model": [resolve(each, "model") for each in (inputs.oracle_model,) if each],
        "oracle_code": [resolve(each, "dataset") for each in (inputs.oracle_code,) if each],
    }


def _compare(config: RunConfig, external: dict[str, list[External]], tasks: StepTasks) -> None:
    steps = Steps(config, external)
    prompts = tasks.submit(steps.prepare()).at("test.parquet")
    [policy], [base] = external["policy"], external["base"]
    sampling, do = steps.for_evaluation(), tasks.submit
    base_samples = sample_and_score(steps, do, "base", 0, sampling, base, prompts)
    own = sample_and_score(steps, do, "policy", 0, sampling, policy, prompts, base_samples)
    do(steps.evaluate("evaluate", 0, own, base_samples, base))


def _comparison(config: RunConfig, models: Models, artifacts: Mapping[str, Artifact]) -> Comparison:
    asked = config.evaluation
    solved = Solved.of(asked)
    files = places(artifacts, "evaluate", "policy", "base", asked.num_shards)
    metrics = _metrics(artifacts["evaluate"])
    controlled = {model: length_controlled(metrics, model) for model in ("policy", "base")}
    return Comparison(
        models,
        artifacts["evaluate"].address(),
        metrics,
        {model: {**estimates(files, model, solved), **each} for model, each in controlled.items()},
        tuple(dict.fromkeys([*solved_names(solved), *controlled["policy"]])),
        tuple(
            artifacts[f"policy/generate/{shard}"].file("responses.parquet")
            for shard in range(asked.num_shards)
        ),
        files.scores,
    )


def _metrics(artifact: Artifact) -> dict[str, Any]:
    loaded = json.loads(artifact.file("metrics.json").read_text())
    assert isinstance(loaded, dict)
    return loaded
