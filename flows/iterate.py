"""The flow `iterate`: T iterations of iterative online RLHF with an exploratory bonus."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import State

from flows.execution.cancellation import stage_flow
from flows.execution.observer import OBSERVERS
from flows.execution.plan import plan
from flows.execution.prefect_tasks import step_tasks
from flows.execution.run_record import RunRecord, recorded_attempt, resume_command
from flows.execution.step_executor import StepExecutor
from flows.execution.trial import try_own_code
from flows.pipeline.algorithm import all_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.form import OneOf, RunOverrides
from flows.pipeline.presets import DEFAULT_PRESET, NO_PRESET, configured, fresh_run, preset_names
from flows.pipeline.step import Step
from flows.report import html
from flows.report.prefect_artifacts import (
    failed,
    label,
    publish,
    publish_configuration,
    publish_table,
)
from flows.report.summary import Summary, kappa_label, summarise
from flows.tracking import tracked
from stages.contract.errors import GebError, RunCancelledError, StoreError, UserError

Preset = Annotated[str, OneOf(preset_names)]
NOTHING: dict[str, Any] = {}


def telling_name(config: RunConfig) -> str:
    """``llama3-geb-arctanh-kl · arctanh · reverse_kl · ratio 0.001 · seed 0``."""
    train = config.train
    parts = [config.name, train.method, str(train.divergence), kappa_label(train)]
    return " · ".join([*filter(None, parts), f"seed {config.seed}"])


@dataclass(frozen=True)
class RunResult:
    """Results of a run, and the place of its HTML report."""

    summary: Summary
    report: str


def _flow_run_name() -> str:
    given = flow_run.parameters
    preset = given["preset"]
    try:
        return telling_name(_asked(preset, given["config"], given["fresh"]))
    except UserError:
        # The flow says what is wrong; a name must not.
        return f"{preset} · refused"


@stage_flow("iterate", _flow_run_name)
def iterate(
    preset: Preset = DEFAULT_PRESET,
    config: RunOverrides = NOTHING,
    fresh: bool = False,
) -> RunResult | State[Any]:
    """Runs generate → score → pair → train → evaluate → promote for each iteration.

    Finished stages are found in the store and shown as Cached; a failed one runs again when the
    flow run is retried, resumed, or started anew with the same parameters.

    Args:
        preset: The configuration to start from: the quickstart, or an experiment of the paper.
        config: What is to differ from the preset. An empty field takes the preset's value, or the
            default if the preset has none.
        fresh: For schedules. Without it a run with unchanged parameters finds everything in the
            store and computes nothing; with it each run has the date and time of its start in its
            name, and a seed of its own.
    """
    asked: RunConfig | None = None
    executor: StepExecutor | None = None
    # Before its configuration is on record a run cannot be resumed.
    resume: str | None = None
    try:
        asked = _asked(preset, config, fresh)
        publish_configuration(asked, preset)
        ready = _checked(asked)
        with recorded_attempt(ready.record, lambda: _put_on_record(asked, ready.record)):
            executor = ready
            resume = resume_command(asked.name, asked.store)
            return _run(asked, executor)
    except GebError as error:
        if executor is not None and not isinstance(error, RunCancelledError):
            _report_failure(executor.record)
        return failed(error, asked.name if asked else preset, resume)


def _report_failure(record: RunRecord) -> None:
    """Writes the report anew: the page of an earlier attempt may speak of success."""
    # If the store failed, the run's own error is the one to report.
    with contextlib.suppress(StoreError):
        html.write(record, summarise(record))


def _asked(preset: str, config: dict[str, Any], fresh: bool) -> RunConfig:
    found = configured(preset, config)
    start = flow_run.scheduled_start_time
    return fresh_run(found, start) if fresh and start is not None else found


def iterate_resolved(config: RunConfig) -> RunResult:
    """Calls the flow with a configuration that was read already, for programs.

    Observers, steps to compute again and resolved inputs are those of the present block.

    Raises:
        GebError: The run failed.
    """
    return iterate(NO_PRESET, config.to_values())


def _checked(config: RunConfig) -> StepExecutor:
    """Checks what can be checked before the first stage."""
    label(config)
    try_own_code(config)
    return StepExecutor(config)


def _put_on_record(config: RunConfig, record: RunRecord) -> None:
    record.start(config, lambda: {each.step: each.key for each in plan(config)})


def _run(config: RunConfig, executor: StepExecutor) -> RunResult:
    record = executor.record
    with tracked(config, record, _warn(config.name)) as track:

        def show_iteration(step: Step) -> None:
            # An iteration ends with the registration of its checkpoint.
            if step.params.writes_registry:
                try:
                    summary = summarise(record)
                except FileNotFoundError:
                    # `--from` has just set aside what it was about to read, of a later iteration,
                    # whose own end shows the table.
                    return
                publish_table(summary, step.iteration)
                track(summary)

        with step_tasks(executor, show_iteration) as tasks:
            for step in all_steps(config):
                tasks.submit(step)
            tasks.wait()
        summary = summarise(record)
        report = html.write(record, summary)
        publish(summary, report)
        track(summary)
    return RunResult(summary, report)


def _warn(run: str) -> Callable[[str], None]:
    def warn(message: str) -> None:
        get_run_logger().warning(message)
        for each in OBSERVERS.get():
            each.run_warning(run, message)

    return warn
