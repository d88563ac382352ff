"""The flow `evaluate`: two models compared on held-out prompts, generate → score → evaluate."""

from __future__ import annotations

import json
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
from flows.pipeline.external import External, resolve
from flows.pipeline.inputs import require_oracle_inputs, resolve_inputs, resolve_model, suite_inputs
from flows.pipeline.presets import DEFAULT_PRESET, NO_PRESET, configured
from flows.pipeline.step import Model
from flows.pipeline.steps import Steps
from flows.report.failure import failed
from flows.report.two_models import ModelComparison, Models, read_comparison
from stages.contract.errors import GebError, RunCancelledError, UserError
from stages.contract.store import Store
from stages.contract.stores import open_store


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
) -> ModelComparison | State[Any]:
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


def evaluate_resolved(config: RunConfig, models: Models) -> ModelComparison:
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


def _evaluate(config: RunConfig, models: Models) -> ModelComparison:
    store = open_store(config.store, create=True)
    external = _external(config, models, store)
    if models.suite is not None:
        config = config.for_suite(models.suite)
    elif models.prompts is not None:
        config = config.model_copy(update={"iterations": 0})
    with step_tasks(StepExecutor(config)) as tasks:
        _compare(config, external, tasks)
        artifacts = tasks.wait()
    found = read_comparison(config, models, artifacts)
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
        "policy": resolve_model(models.policy, store),
        "base": resolve_model(base, store),
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
    policy, base = Model(*external["policy"]), Model(*external["base"])
    sampling, do = steps.for_evaluation(), tasks.submit
    base_samples = sample_and_score(steps, do, "base", 0, sampling, base, prompts)
    own = sample_and_score(steps, do, "policy", 0, sampling, policy, prompts, base_samples)
    do(steps.evaluate("evaluate", 0, own, base_samples, base))
