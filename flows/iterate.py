"""The flow: T iterations of iterative online RLHF with an exploratory bonus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from prefect import Flow, flow
from prefect.runtime import flow_run
from prefect.states import State

from flows.execution.cancellation import ends_cancelled
from flows.execution.console import Silent
from flows.execution.hooks import remove_containers
from flows.execution.prefect_tasks import executing
from flows.execution.step_executor import StepExecutor, Watcher
from flows.pipeline.algorithm import walk
from flows.pipeline.config import SET_BY_THE_RUN, RunConfig
from flows.pipeline.form import FormOf, OneOf
from flows.pipeline.presets import DEFAULT_PRESET, configured, preset_names
from flows.pipeline.steps import Step
from flows.report import html
from flows.report.failure import failed, resume_command
from flows.report.publish import label, publish, publish_configuration, publish_table
from flows.report.summary import Summary, summarise
from stages.contract.errors import GebError, RunCancelledError, UserError

Preset = Annotated[str, OneOf(preset_names)]
Overrides = Annotated[dict[str, Any], FormOf(RunConfig, hidden=SET_BY_THE_RUN)]
NOTHING: dict[str, Any] = {}


def telling_name(config: RunConfig) -> str:
    """``llama3-geb-arctanh-kl · arctanh · reverse_kl · κ=0.0001 · seed 0``."""
    train = config.train
    kappa = f"κ={train.kappa:g}" if train.target_ratio is None else f"ratio={train.target_ratio:g}"
    return " · ".join(
        [config.name, train.design, str(train.divergence), kappa, f"seed {config.seed}"]
    )


def _requested_name() -> str:
    preset = flow_run.parameters["preset"]
    try:
        return telling_name(configured(preset, flow_run.parameters["config"]))
    except UserError:
        # The flow says what is wrong; a name must not.
        return f"{preset} · refused"


@flow(
    name="iterate",
    flow_run_name=_requested_name,
    persist_result=False,
    on_cancellation=[remove_containers],
    on_crashed=[remove_containers],
)
@ends_cancelled
def iterate(preset: Preset = DEFAULT_PRESET, config: Overrides = NOTHING) -> State[Any] | None:
    """Runs generate → score → pair → train → evaluate → promote for each iteration.

    Finished stages are found in the store and shown as Cached; a failed one runs again when the
    flow run is retried, resumed, or started anew with the same parameters.

    Args:
        preset: The configuration to start from: the quickstart, or an experiment of the paper.
        config: What is to differ from the preset. An empty field takes the preset's value, or the
            default where the preset has none.
    """
    asked: RunConfig | None = None
    try:
        asked = configured(preset, config)
        publish_configuration(asked, preset)
        execute(asked, Silent())
    except RunCancelledError:
        raise
    except GebError as error:
        if asked is None:
            return failed(error, preset)
        return failed(error, asked.name, resume_command(asked))
    return None


def watched_flow(
    watcher: Watcher, forced: Callable[[Step], bool]
) -> Flow[[RunConfig], tuple[Summary, str]]:
    """The same flow for a terminal: it tells ``watcher`` what happens and returns what it found."""

    @ends_cancelled
    def run(config: RunConfig) -> tuple[Summary, str]:
        return execute(config, watcher, forced)

    def name() -> str:
        return telling_name(flow_run.parameters["config"])

    return flow(name=iterate.name, flow_run_name=name, persist_result=False)(run)


def execute(
    config: RunConfig, watcher: Watcher, forced: Callable[[Step], bool] = lambda step: False
) -> tuple[Summary, str]:
    """Runs a configuration to its end; to be called inside a flow.

    Returns:
        What the run found, and its HTML report.
    """
    label(config)
    session = StepExecutor(config, watcher, forced)
    session.view.save_config(config)

    def show_iteration(step: Step) -> None:
        if step.stage == "promote":
            publish_table(summarise(session.view), step.iteration)

    with executing(session, show_iteration) as executor:
        walk(config, executor.do)
        executor.wait()
    summary = summarise(session.view)
    report = html.write(session.view, summary)
    publish(summary, report, html.draw(summary))
    return summary, report
