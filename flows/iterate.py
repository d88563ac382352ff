"""The flow `iterate`: T iterations of iterative online RLHF with an exploratory bonus."""

import contextlib
from dataclasses import dataclass
from typing import Annotated, Any

from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows.execution.observer import Session
from flows.execution.plan import plan
from flows.execution.prefect_tasks import step_tasks
from flows.execution.run_record import RunRecord, recorded_run_attempt
from flows.execution.stage_flow import call_as_flow, stage_flow
from flows.execution.step_executor import StepExecutor
from flows.execution.trial import try_own_code
from flows.pipeline.algorithm import ResolvedRun, resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.form import RunOverrides, one_of
from flows.pipeline.presets import DEFAULT_PRESET, configured, fresh_run, preset_names
from flows.pipeline.step import Step
from flows.report import html
from flows.report.prefect_artifacts import publish
from flows.report.summary import Summary, summarise
from flows.report.verdict import verdict
from flows.runners.choose import check_host, check_place
from flows.tracking import tracked
from stages.contract.atomic import explain_disk_errors
from stages.contract.errors import GebError, RunCancelledError, UserError
from stages.contract.events import Log

Preset = Annotated[str, one_of(preset_names())]
NOTHING: dict[str, Any] = {}


@dataclass(frozen=True)
class RunResult:
    """Results of a run, and the address of its HTML report."""

    summary: Summary
    report: str


def _flow_run_name() -> str:
    given = flow_run.parameters
    try:
        return _chosen(given["preset"], given["config"], given["fresh"]).name
    except UserError:
        # The flow says what is wrong; a name must not.
        return f"{given['preset']} refused"


@stage_flow("iterate", _flow_run_name)
def iterate(
    preset: Preset = DEFAULT_PRESET,
    config: RunOverrides = NOTHING,
    fresh: bool = False,
) -> RunResult | State[Any]:
    """Runs generate → score → pair → train → evaluate → promote for each iteration.

    Finished stages are found in the store and shown as Cached; a failed one runs again when the
    flow run is retried, resumed, or started anew with the same parameters (without `fresh`).

    Args:
        preset: The configuration to start from: the quickstart, or an experiment of the paper.
        config: Differences from the preset. An empty field takes the preset's value, or the
            default if the preset has none.
        fresh: For schedules. Without it a run with unchanged parameters finds everything in the
            store and computes nothing; with it each run has the date and time of its start in its
            name, and a separate seed.
    """
    return _checked_run(resolve_run(_chosen(preset, config, fresh)), Session())


def run_as_flow(run: ResolvedRun, session: Session) -> RunResult:
    """Checks and executes a run as a flow run of this process; GebError if it fails."""
    return call_as_flow("iterate", run.config.name, lambda: _checked_run(run, session))


def _checked_run(run: ResolvedRun, session: Session) -> RunResult | State[Any]:
    config = run.config
    try_own_code(config)
    stages = {step.stage for step in run.steps}
    check_host(config, stages)
    check_place(config, stages)
    return run_steps(run, session)


def run_steps(run: ResolvedRun, session: Session) -> RunResult | State[Any]:
    """Computes what the store lacks of a checked run; within a flow run, whose state it returns.

    Raises:
        GebError: The run failed.
    """
    executor = StepExecutor(run.config, session.observers)
    record = executor.record
    has_begun = False
    try:
        with recorded_run_attempt(record, lambda: _put_on_record(run, record)):
            has_begun = True
            result = _compute_steps(run, executor, session)
    except GebError as error:
        # One that was not to begin leaves the report to the attempt at work.
        if has_begun and not isinstance(error, RunCancelledError):
            # The page of an earlier attempt may report a success. This error is the one to report.
            with contextlib.suppress(GebError, OSError):
                html.write(record, summarise(record))
        raise
    message = f"{verdict(result.summary).sentence} Report: {result.report}"
    return Completed(message=message, data=result)


def _put_on_record(run: ResolvedRun, record: RunRecord) -> None:
    lines = plan(run)
    again = {line.key: line.stage for line in lines if line.action == "again" and line.key}
    keys = {line.step: "" if line.action == "again" else line.key for line in lines}
    record.start(run.config, keys)
    with explain_disk_errors(record.store.root):
        for key, stage in again.items():
            record.store.drop_work(stage, key)
            # There may be no more than work, or another run may have set it aside just now.
            with contextlib.suppress(FileNotFoundError):
                aside = record.store.set_aside(stage, key)
                get_run_logger().info("%s is computed again; it was moved to %s", stage, aside)


def _chosen(preset: str, config: dict[str, Any], fresh: bool) -> RunConfig:
    chosen = configured(preset, config)
    start = flow_run.scheduled_start_time
    return fresh_run(chosen, start) if fresh and start else chosen


def _compute_steps(run: ResolvedRun, executor: StepExecutor, session: Session) -> RunResult:
    record = executor.record
    config = run.config

    def warn(message: str) -> None:
        get_run_logger().warning(message)
        for observer in session.observers:
            observer.run_log(config.name, Log(level="warning", message=message))

    with tracked(config, record, warn) as track:

        def show() -> RunResult:
            summary = summarise(record)
            report = html.write(record, summary)
            judged = verdict(summary)
            notes = [f"- {note}" for note in (*judged.reasons, *judged.cautions)]
            places = [*summary.places(), f"report      {report}"]
            curves = {summary.run: summary.rows}
            publish(summary.run, [judged.sentence, *notes], summary.tables(), places, curves)
            track(summary)
            return RunResult(summary, report)

        def show_iteration(step: Step) -> None:
            # An iteration ends with the registration of its checkpoint.
            if step.params.writes_registry:
                # `--from` of another run may just have set aside what this one shows.
                with contextlib.suppress(FileNotFoundError):
                    show()

        with step_tasks(executor, session, show_iteration) as tasks:
            for step in run.steps:
                tasks.submit(step)
            tasks.wait()
        return show()
