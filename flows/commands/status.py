"""Commands ``geb status`` and ``geb logs``: the course of runs."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.markup import escape

from flows.commands.common import AsJson, RunName, StorePath, answer, console
from flows.commands.terminal import neutral
from flows.execution.run_record import AT_WORK, RunRecord, StepRecord, runs
from flows.planning.show import duration
from flows.report.status import (
    RunStatus,
    clock,
    run_status,
    step_logs,
)
from flows.report.table import FittedTable
from stages.contract.errors import UserError
from stages.store.opening import open_store


def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run; all if left out."),
    ] = None,
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Show the runs of a store, or the steps of one run: state, steps done, times, attempts."""
    opened = open_store(store)
    if name is None:
        statuses = [run_status(RunRecord(opened, run, refresh=False)) for run in runs(opened)]
        table = _shown(statuses) if statuses else f"no runs in {opened.location}"
        shown: list[RenderableType] = [table]
    else:
        statuses = [run_status(RunRecord.existing(opened, name))]
        shown = _one(statuses[0])
    answer(as_json, {run.name: run.to_json() for run in statuses}, *shown)


def logs(
    name: RunName,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="[STEP]",
            help="A step; by default the running ones, else the failed ones, else the last.",
        ),
    ] = None,
    store: StorePath = "store",
) -> None:
    """Print the log of the last attempt at a step, with the place of its file."""
    record = RunRecord.existing(open_store(store), name)
    chosen = _chosen(run_status(record), step)
    logs_of_steps = [
        (logged, paths) for logged in chosen if (paths := step_logs(record.store, logged))
    ]
    if not logs_of_steps:
        raise UserError(
            f"{record.store.location} has no log of {', '.join(logged.step for logged in chosen)}",
            "a reused step has its log in the store that computed it; name another step",
        )
    for logged, paths in logs_of_steps:
        console.print(
            f"[bold]{logged.step}[/] {logged.state}, attempt {len(paths)}, "
            f"{escape(str(paths[-1]))}",
            soft_wrap=True,
        )
        for line in paths[-1].read_bytes().decode(errors="replace").removesuffix("\n").split("\n"):
            # A progress bar draws over itself: what it showed last counts.
            shown = line.rstrip("\r").rpartition("\r")[2]
            typer.echo(neutral(shown) if sys.stdout.isatty() else shown)


def _chosen(run: RunStatus, step: str | None) -> Sequence[StepRecord]:
    if step is not None:
        named = [record for record in run.steps if record.step == step]
        if not named:
            names = ", ".join(record.step for record in run.steps) or "none"
            raise UserError(f"run {run.name} has not reached a step {step!r}", f"it has: {names}")
        return named
    for states in (AT_WORK, ("failed", "crashed", "cancelled", "stopped")):
        if chosen := [record for record in run.steps if record.state in states]:
            return chosen
    computed = [record for record in run.steps if record.state == "done"]
    return (computed or run.steps)[-1:]


def _shown(statuses: Sequence[RunStatus]) -> FittedTable:
    rows = [
        [
            run.name,
            run.state,
            f"{run.num_done}/{run.num_steps}",
            clock(run.started),
            duration(run.elapsed),
            str(len(run.attempts) or "-"),
        ]
        for run in statuses
    ]
    return FittedTable("", ("run", "state", "steps", "started", "took", "attempts"), rows, left=2)


def _one(run: RunStatus) -> list[RenderableType]:
    """Head, steps and messages of one run."""
    number = f", attempt {len(run.attempts)}" if len(run.attempts) > 1 else ""
    head = (
        f"run {run.name} {run.state}: {run.num_done} of {run.num_steps} steps\n"
        f"started {clock(run.started)}, {duration(run.elapsed)}{number}\n"
        f"store   {run.store.location}\n"
    )
    rows = [
        [
            step.step,
            step.state,
            duration(step.seconds),
            str(len(step_logs(run.store, step)) or "-"),
            step.key[:12],
        ]
        for step in run.steps
    ]
    rows += [[name, "waiting", "", "", ""] for name in run.waiting]
    messages = [
        f"{step.step}: {step.message.splitlines()[0]}"
        for step in run.steps
        if step.state in (*AT_WORK, "failed", "crashed") and step.message
    ]
    table = FittedTable("", ("step", "state", "took", "attempts", "key"), rows, left=2)
    return [head, table, *messages]
