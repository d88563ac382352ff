"""Commands ``geb run``, ``geb resume``, ``geb plan`` and ``geb report``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.text import Text

from flows.commands.common import (
    AsJson,
    ConfigPath,
    ConfigStore,
    DryRun,
    FromStep,
    Overrides,
    RunName,
    RunnerName,
    StorePath,
    answer,
    config_of_command,
    prefect_session,
    watched,
)
from flows.commands.terminal import show_warning
from flows.execution.plan import PlannedStep
from flows.execution.plan import plan as planned
from flows.execution.run_record import RunRecord, run_attempts
from flows.execution.trial import try_own_code
from flows.pipeline.algorithm import ResolvedRun, resolve_run
from flows.pipeline.config import RunConfig
from flows.planning.cautions import cautions
from flows.planning.estimate import RunEstimate, estimate
from flows.planning.show import cost_line
from flows.report.table import FittedTable
from flows.runners.choose import check_host, check_place
from stages.contract.errors import EXIT_FAILED, UserError
from stages.store.opening import location_of, open_store

if TYPE_CHECKING:
    from flows.report.summary import Summary


def run(
    config: ConfigPath,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    from_step: FromStep = None,
    as_json: AsJson = False,
) -> None:
    """Run a configuration; whatever the store has already is reused."""
    _plan_and_run(config_of_command(config, overrides, runner, store), from_step, as_json)


def resume(
    name: RunName,
    store: StorePath = "store",
    from_step: FromStep = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that failed or was stopped, with the configuration it was started with."""
    record = RunRecord.existing(open_store(store), name)
    # A run is resumed in the store that holds it, which may have moved.
    config = record.config(strict=True).model_copy(update={"store": location_of(store)})
    _plan_and_run(config, from_step, as_json, dry_run)


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    from_step: FromStep = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run would reuse, compute, and why, and its cost."""
    settings = config_of_command(config, overrides, runner, store)
    _plan_and_run(settings, from_step, as_json, dry_run=True)


def report(name: RunName, store: StorePath = "store", as_json: AsJson = False) -> None:
    """Write the HTML report of a run and print its table."""
    from flows.report import html
    from flows.report.summary import summarise

    record = RunRecord.existing(open_store(store), name)
    summary = summarise(record)
    _show_summary(summary, html.write(record, summary), as_json)
    if summary.damaged:
        raise typer.Exit(EXIT_FAILED)


def _plan_and_run(
    config: RunConfig,
    from_step: str | None,
    as_json: bool,
    dry_run: bool = False,
) -> None:
    resolved = resolve_run(config, from_step)
    config = resolved.config
    lines = planned(resolved)
    to_run = {line.stage for line in lines if line.action != "reuse"}
    check_place(config, to_run)
    try_own_code(config, to_run)
    record = RunRecord(open_store(config.store), config.name)
    if not dry_run and not to_run and _is_finished(record, config):
        _send_to_trackers(config, record)
        report(config.name, config.store, as_json)
        return
    expected = estimate(config, resolved.steps, lines)
    cost = cost_line(expected)
    warnings = [
        *(cautions(config, resolved.steps) if "train" in to_run else ()),
        *expected.warnings,
    ]
    if dry_run:
        _show_plan(lines, expected, cost, as_json)
        # Another host may be the one to run it.
        try:
            check_host(config, to_run)
        except UserError as error:
            warnings.append(f"a run here would be refused: {error.message}")
    for warning in warnings:
        show_warning(warning)
    if not dry_run:
        check_host(config, to_run)
        _execute(resolved, lines, cost, as_json)


def _send_to_trackers(config: RunConfig, record: RunRecord) -> None:
    """Sends what trackers of a finished run have not got."""
    if not config.tracking.report_to:
        return
    from flows.report.summary import summarise
    from flows.tracking import tracked

    with tracked(config, record, show_warning) as track:
        track(summarise(record))


def _is_finished(record: RunRecord, config: RunConfig) -> bool:
    states = [attempt.state for attempt in run_attempts(record)]
    return record.holds(config) and states[-1:] == ["completed"]


def _execute(resolved: ResolvedRun, lines: list[PlannedStep], cost: str, as_json: bool) -> None:
    config = resolved.config
    num_reused = sum(line.action == "reuse" for line in lines)
    shown = watched(as_json)
    shown.print(
        f"run [bold]{config.name}[/]: {len(lines)} steps, {num_reused} in the store, "
        f"{len(lines) - num_reused} to compute; store {escape(open_store(config.store).location)}"
    )
    shown.print(cost)
    with prefect_session(config.store, config.name, as_json, len(lines)) as session:
        from flows.execution.stage_flow import call_as_flow
        from flows.iterate import run_steps

        result = call_as_flow("iterate", config.name, lambda: run_steps(resolved, session))
    _show_summary(result.summary, result.report, as_json)


def _show_summary(summary: Summary, page: str, as_json: bool) -> None:
    from flows.report.verdict import verdict

    judgement = verdict(summary)
    answer(
        as_json,
        summary.to_json() | {"verdict": dataclasses.asdict(judgement), "report": page},
        Text(judgement.sentence, style=_TONES[judgement.tone]),
        *(f"  {reason}" for reason in (*judgement.reasons, *judgement.cautions)),
        *summary.tables(),
        *summary.places(),
        f"report      {page}",
    )


_TONES = {"good": "green", "bad": "bold red", "open": "yellow"}
"""Style of a verdict on a terminal."""


def _show_plan(lines: list[PlannedStep], expected: RunEstimate, cost: str, as_json: bool) -> None:
    rows = [
        [line.step, line.action, line.because, line.key[:12] if line.key else "-"] for line in lines
    ]
    table = FittedTable("", ("step", "action", "why", "key"), rows, left=4)
    pairs = zip(lines, expected.steps, strict=True)
    document = [vars(line) | step.to_json() for line, step in pairs]
    answer(as_json, document, table, cost)
