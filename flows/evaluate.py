"""The flow `evaluate`: two models compared on held-out prompts, generate → score → evaluate."""

from dataclasses import asdict, dataclass
from typing import Any

from flows.execution.observer import Session
from flows.execution.prefect_tasks import step_tasks
from flows.execution.stage_flow import stage_flow
from flows.execution.step_executor import StepExecutor
from flows.execution.trial import try_own_code
from flows.iterate import NOTHING, Preset
from flows.pipeline.algorithm import ResolvedRun, sample_and_score
from flows.pipeline.config import RunConfig
from flows.pipeline.form import RunOverrides
from flows.pipeline.inputs import ComparedModels, resolve_compared
from flows.pipeline.preflight import check_data, check_environment, check_templates
from flows.pipeline.presets import DEFAULT_PRESET, configured
from flows.pipeline.step import Source
from flows.pipeline.steps import Steps
from flows.report.differences import (
    Difference,
    adjusted,
    against_base,
    difference_text,
    p_text,
)
from flows.report.prefect_artifacts import publish
from flows.report.summary import evaluated_row
from flows.report.table import (
    BASE,
    POLICY,
    FigureRow,
    FittedTable,
    Lines,
    figures_table,
)
from flows.runners.choose import check_host, check_place
from stages.contract.errors import UserError
from stages.contract.request import ArtifactInput, Input
from stages.store.base import Store
from stages.store.opening import open_store

# The inputs that lead from a checkpoint to its training's split of the prompts.
_TRAINED_ON = ("pairs", "responses", "prompts")


@dataclass(frozen=True)
class ModelComparison:
    """Result of an evaluation.

    Attributes:
        artifact: Address of the artifact with all metrics.
        figures: The base's figures and the policy's.
        differences: Figures in which the models differ, prompt by prompt, with p-values by Holm.
    """

    models: ComparedModels
    artifact: str
    figures: list[FigureRow]
    differences: list[Difference]

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        base, policy = self.figures
        return vars(self.models) | {
            "artifact": self.artifact,
            "figures": {POLICY: asdict(policy)["figures"], BASE: asdict(base)["figures"]},
            "differences": [asdict(difference) for difference in self.differences],
            "verdict": self.verdict(),
        }

    def verdict(self) -> str:
        """The difference of the mean rewards, with its interval and test."""
        tests = {difference.figure: difference for difference in self.differences}
        reward = tests.get("mean_reward")
        text = difference_text(self.models.policy, reward)
        prompts = f", {reward.test}" if reward else ""
        return f"By mean reward against {self.models.base or 'its base'}, {text}{prompts}."

    def table(self) -> FittedTable:
        """The policy's figures, the base's, and their differences with p-values."""
        base, policy = self.figures
        differences = {}
        p_values = {}
        for test in self.differences:
            differences[test.figure] = test.shown()
            p_values[test.figure] = p_text(test.adjusted_p_value)
        lines: Lines = {
            (f"{POLICY} {self.models.policy}",): policy.cells(),
            (f"{BASE} {self.models.base or ''}",): base.cells(),
            ("difference",): differences,
            ("p by Holm",): p_values,
        }
        return figures_table("Figures", ["model"], lines)


@stage_flow("evaluate", "{policy}")
def evaluate(
    policy: str,
    base: str = "",
    suite: str = "",
    preset: Preset = DEFAULT_PRESET,
    config: RunOverrides = NOTHING,
) -> ModelComparison:
    """Compares a model with a base: both answer the same prompts, and the oracle scores them.

    Args:
        policy: A registered model (`name`, `name@alias` or `name:version`), a checkpoint folder,
            or a hub id.
        base: The model to compare with; empty takes the one that the configuration starts from.
        suite: Suite of the configuration whose prompts, sampling and oracle are used; empty takes
            the evaluation on held-out prompts.
        preset: The configuration whose sampling, oracle and metrics are used.
        config: Differences from the preset. An empty field takes the preset's value, or the
            default if the preset has none.
    """
    models = ComparedModels(policy, base or None, suite or None)
    run = resolve_comparison(configured(preset, config), models)
    return compare_models(run, models, Session())


def resolve_comparison(config: RunConfig, models: ComparedModels) -> ResolvedRun:
    """Finds the inputs of a comparison of two models, and lists its steps.

    Raises:
        UserError: A model, the suite or an input is missing or not named.
        HubUnreachableError: The hub cannot be asked for a revision.
    """
    config, external = resolve_compared(config, models)
    check_templates(config, {"": external})
    steps = Steps(config, {"": external})
    [policy] = external["policy"]
    [base] = external["base"]
    sampling = steps.for_evaluation()
    prompts: Source
    if isinstance(policy, ArtifactInput) and models.suite is None and not external["test_prompts"]:
        prompts = _held_out(open_store(config.store), models.policy, policy)
    else:
        check_data(config, {"": external})
        prompts = steps.prepare().at("test.parquet")
    base_samples = sample_and_score(steps, "base", sampling, base, prompts)
    samples = sample_and_score(steps, "policy", sampling, policy, prompts, base_samples)
    steps.evaluate("evaluate", samples, base_samples, base)
    return ResolvedRun(config, steps.listed)


def compare_models(run: ResolvedRun, models: ComparedModels, session: Session) -> ModelComparison:
    """Compares two models, within a flow run; GebError if that fails.

    ``run`` is from :func:`resolve_comparison`.
    """
    config = run.config
    check_environment(config)
    stages = {step.stage for step in run.steps}
    check_host(config, stages)
    check_place(config, stages)
    try_own_code(config, {"score"})
    with step_tasks(StepExecutor(config, session.observers), session) as tasks:
        for step in run.steps:
            tasks.submit(step)
        evaluation = tasks.wait()["evaluate"]
    figures = [evaluated_row(evaluation, 0), evaluated_row(evaluation, 1)]
    differences = adjusted([*against_base(evaluation, "evaluate")])
    comparison = ModelComparison(models, evaluation.address(), figures, differences)
    sentences = [comparison.verdict()]
    publish(config.name, sentences, [comparison.table()], [comparison.artifact], {})
    return comparison


def _held_out(store: Store, model: str, checkpoint: Input) -> ArtifactInput:
    """The prompts that a model's training held out; UserError if they are not in the store.

    Another split, such as one of the run's later start, might hold out prompts that the model was
    trained on.
    """
    sources = [checkpoint]
    while sources:
        source = sources.pop()
        if isinstance(source, ArtifactInput):
            artifact = store.load(source.stage, source.key, "test.parquet")
            if artifact and source.stage == "prepare":
                return artifact.ref("test.parquet")
            inputs = artifact.manifest.inputs if artifact else {}
            for name in _TRAINED_ON:
                sources += inputs.get(name, ())
    raise UserError(
        f"the prompts that the training of {model} held out are not in {store.location}",
        "set inputs.test_prompts, or name a suite",
    )
