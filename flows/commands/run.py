"""Commands ``geb run``, ``geb resume``, ``geb plan`` and ``geb report``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.common import (
    AsJson,
    ConfigPath,
    ConfigStore,
    FromIteration,
    FromStage,
    Overrides,
    RunName,
    RunnerName,
    StorePath,
    as_it_is,
    configured,
    configured_run,
    console,
    forced_from,
    print_json,
)
from flows.commands.terminal import messages
from flows.execution.oracle_trial import try_oracle
from flows.execution.plan import PlannedStep, plan
from flows.execution.recompute import StepFilter
from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.external import inputs_resolved_once
from flows.planning.cautions import cautions
from flows.planning.estimate import estimate
from flows.planning.show import (
    memory_table,
    save_estimate,
    step_table,
    summary_line,
    to_json,
    warning_lines,
)
from flows.standing.home import Home, default_home
from stages.contract.errors import EXIT_FAILED, UserError
from stages.contract.stores import open_store

if TYPE_CHECKING:
    from flows.report.summary import Summary

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and start nothing.")]
WithEstimate = Annotated[
    bool,
    typer.Option("--estimate", help="Show tokens, operations, memory, disk, hours and price."),
]


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    app.command("run")(run)
    app.command("resume")(resume)
    app.command("plan")(show_plan)
    app.command("report")(report)


def run(
    config: ConfigPath,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    from_stage: FromStage = None,
    from_iteration: FromIteration = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a configuration; whatever the store has already is reused."""
    _run(configured(config, overrides, runner, store), from_stage, from_iteration, dry_run, as_json)


def resume(
    name: RunName,
    store: StorePath = "store",
    from_stage: FromStage = None,
    from_iteration: FromIteration = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that failed or was stopped, with the configuration it was started with."""
    _run(configured_run(store, name), from_stage, from_iteration, dry_run, as_json)


def show_plan(
    config: ConfigPath,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    from_stage: FromStage = None,
    from_iteration: FromIteration = None,
    with_estimate: WithEstimate = False,
    as_json: AsJson = False,
) -> None:
    """Show what a run would reuse, what it would compute, and why; or what it would cost."""
    asked = configured(config, overrides, runner, store)
    with inputs_resolved_once():
        lines = plan(asked, forced_from(from_stage, from_iteration, asked.iterations))
        _check_before(asked, lines)
        if with_estimate:
            _show_estimate(asked, lines, as_json)
        else:
            _show_plan(lines, as_json)


def report(name: RunName, store: StorePath = "store", as_json: AsJson = False) -> None:
    """Write the HTML report of a run and print its table."""
    # Imported here: the plots' library takes a second to load.
    from flows.report import html
    from flows.report.figures import draw
    from flows.report.summary import summarise

    record = RunRecord.existing(open_store(store), name)
    summary = summarise(record)
    _show_summary(summary, html.write(record, summary, draw(summary)), as_json)
    if summary.damaged:
        raise typer.Exit(EXIT_FAILED)


def _run(
    config: RunConfig,
    from_stage: str | None,
    from_iteration: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    forced = forced_from(from_stage, from_iteration, config.iterations)
    # The run's inputs are those of its plan.
    with inputs_resolved_once():
        lines = plan(config, forced)
        _check_before(config, lines)
        if dry_run:
            _show_plan(lines, as_json)
            return
        _execute(config, lines, forced, as_json)


def _check_before(config: RunConfig, lines: list[PlannedStep]) -> None:
    """Tries the oracle, and warns of settings that cannot work, where they are still to matter.

    Raises:
        UserError: The oracle cannot work.
    """
    to_run = {line.stage for line in lines if line.action == "run"}
    if "score" in to_run:
        try_oracle(config)
    if "train" in to_run:
        # On stderr: stdout may be for a document.
        errors = messages()
        for each in cautions(config):
            errors.print(f"[bold yellow]warning[/] {escape(each)}")


def _execute(
    config: RunConfig, lines: list[PlannedStep], forced: StepFilter, as_json: bool
) -> None:
    counts = Counter(line.action for line in lines)
    # With --json, stdout is for the document alone.
    watched = messages() if as_json else console
    watched.print(
        f"run [bold]{config.name}[/]: {len(lines)} steps, {counts['reuse']} in the store, "
        f"{counts['run']} to compute; store {escape(open_store(config.store).location)}"
    )
    expected = estimate(config, lines)
    record = RunRecord(open_store(config.store), config.name)
    save_estimate(record, expected)
    for line in (summary_line(expected), *warning_lines(expected)):
        watched.print(line)
    quiet_prefect()
    signal.signal(signal.SIGTERM, interrupt)
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from flows.execution.console import ConsoleObserver
    from flows.execution.observer import observing
    from flows.execution.recompute import recomputing
    from flows.iterate import iterate_resolved
    from flows.standing.server import ensure_prefect_server

    if ui := ensure_prefect_server(record.path / "prefect-server.log", as_it_is(watched)):
        watched.print(f"Prefect UI while it runs: {ui}")
        if standing := Home(default_home()).standing():
            watched.print(
                f"`geb up` is at {standing.ui}; to see runs there: "
                f"export PREFECT_API_URL={standing.api}"
            )
    with ConsoleObserver(watched, len(lines)) as observer:
        try:
            with observing(observer), recomputing(forced):
                result = iterate_resolved(config)
        except BaseException as error:
            # Where the store is gone as well, the run's own error is the one to report.
            with contextlib.suppress(OSError):
                if record.holds(config):
                    watched.print(f"what is done stays done; {_how_to_go_on(config, error)}")
            raise
    _show_summary(result.summary, result.report, as_json)


def _how_to_go_on(config: RunConfig, error: BaseException) -> str:
    store = escape(shlex.quote(config.store))
    resume = f"go on with  [bold]geb resume {config.name} --store {store}[/]"
    if isinstance(error, UserError):
        # It reads the same settings again.
        return f"if a setting is wrong, correct it and run it again; if a file is, {resume}"
    return resume


def _show_summary(summary: Summary, page: str, as_json: bool) -> None:
    from flows.report.verdict import verdict

    found = verdict(summary)
    if as_json:
        print_json(summary.to_json() | {"verdict": dataclasses.asdict(found), "report": page})
        return
    console.print(found.sentence, style=_TONES[found.tone], markup=False)
    for reason in found.reasons:
        console.print(f"  {reason}", markup=False)
    for table in summary.tables():
        console.print(table)
    for line in (*summary.places(), f"report      {page}"):
        console.print(line, markup=False)


_TONES = {"good": "green", "bad": "bold red", "open": "yellow"}
"""Style of a verdict on a terminal."""


def quiet_prefect() -> None:
    """Prefect's settings for a terminal: no log lines beside the observer's, no analytics."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")


def interrupt(signum: int, frame: object) -> None:
    """Signal handler: SIGTERM ends a command as Ctrl-C does."""
    raise KeyboardInterrupt


def _show_estimate(config: RunConfig, lines: list[PlannedStep], as_json: bool) -> None:
    found = estimate(config, lines)
    if as_json:
        print_json(to_json(found))
        return
    # A warning stands before the table that it belongs to.
    for line in warning_lines(found):
        console.print(line)
    console.print(step_table(found))
    console.print(memory_table(found))
    console.print(summary_line(found))


def _show_plan(lines: list[PlannedStep], as_json: bool) -> None:
    if as_json:
        print_json([dataclasses.asdict(line) for line in lines])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("step", "action", "why", "key"):
        table.add_column(column, overflow="fold")
    for line in lines:
        style = "cyan" if line.action == "reuse" else "yellow"
        key = line.key[:12] if line.key else "-"
        table.add_row(line.step, f"[{style}]{line.action}[/]", escape(line.because), key)
    console.print(table)
