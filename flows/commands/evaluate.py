"""Commands ``geb evaluate`` and ``geb sweep``: comparisons of models, and of settings."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.common import (
    AsJson,
    ConfigPath,
    ConfigStore,
    Overrides,
    RunnerName,
    as_it_is,
    configured,
    console,
    print_json,
)
from flows.commands.run import interrupt, quiet_prefect
from flows.commands.terminal import messages
from flows.execution.plan import plan
from flows.pipeline.external import inputs_resolved_once
from flows.pipeline.grid import Cell, cells, parse_axes
from flows.report.outputs import Outputs, export, parse_export
from flows.report.table import FittedTable
from stages.contract.errors import UserError
from stages.contract.stores import open_store

Policy = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Registered model (NAME, NAME@ALIAS, NAME:VERSION), checkpoint folder, or hub id.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    app.command()(evaluate)
    app.command()(sweep)


def evaluate(
    config: ConfigPath,
    policy: Policy,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with it, not with what CONFIG starts from."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts, in place of those that CONFIG holds out."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A suite of CONFIG: its prompts, sampling and oracle."),
    ] = None,
    exports: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            metavar="FORMAT=FILE",
            help="Write MODEL's responses as alpaca_eval, arena_hard or lm_eval have them.",
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Arena-Hard's question.jsonl, for its prompts' ids."),
    ] = None,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model with a base on prompts, with the sampling and the oracle of CONFIG."""
    settings = configured(config, overrides, runner, store)
    wanted = [parse_export(each, questions) for each in exports or ()]
    quiet_prefect()
    signal.signal(signal.SIGTERM, interrupt)
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from flows.evaluate import evaluate_resolved, num_steps
    from flows.execution.console import ConsoleObserver
    from flows.execution.observer import observing
    from flows.report.two_models import Models
    from flows.standing.server import ensure_prefect_server

    watched = messages() if as_json else console
    log = _server_log(settings.store, f"{settings.name}-evaluation")
    ensure_prefect_server(log, as_it_is(watched))
    with ConsoleObserver(watched, num_steps(settings, suite)) as observer, observing(observer):
        found = evaluate_resolved(settings, Models(policy, base, prompts, suite))
    task = suite or "held-out"
    outputs = Outputs(policy, task, found.responses, found.scores, questions)
    for name, path in wanted:
        export(name, path, outputs)
    if as_json:
        print_json(found.to_json())
        return
    console.print(found.table())
    console.print(f"metrics  {found.artifact}", markup=False)
    for name, path in wanted:
        console.print(f"outputs  {path} ({name})", markup=False)


def sweep(
    config: ConfigPath,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="NAME=VALUE,VALUE", help="A field and its values."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="SEED,SEED", help="Seeds of each combination.")
    ] = "0",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the sweep; that of CONFIG if unset.")
    ] = None,
    parallel_runs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the runs and start nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a grid of settings over seeds; ends with mean ± standard deviation and tests."""
    settings = configured(config, overrides, runner, store)
    title = name or f"{settings.name}-sweep"
    planned = cells(title, settings, parse_axes(grid or ()), _seeds(seeds))
    if dry_run:
        with inputs_resolved_once():
            _show_runs(planned, as_json)
        return
    quiet_prefect()
    signal.signal(signal.SIGTERM, interrupt)
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from flows.execution.console import LineObserver
    from flows.execution.observer import observing
    from flows.standing.server import ensure_prefect_server
    from flows.sweep import sweep_resolved

    watched = messages() if as_json else console
    if ui := ensure_prefect_server(_server_log(settings.store, title), as_it_is(watched)):
        watched.print(f"Prefect UI while it runs: {ui}")
    with observing(LineObserver(watched)):
        found = sweep_resolved(title, settings, grid or [], _seeds(seeds), parallel_runs)
    if as_json:
        print_json(found.to_json())
        return
    console.print(found.table())
    for line in found.notes():
        console.print(line, markup=False)
    for what, place in found.files.items():
        console.print(f"{what:6}  {place}", markup=False)


def _seeds(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise UserError(
            f"--seeds {text!r} is not SEED,SEED", "write for example --seeds 0,1,2"
        ) from None


def _server_log(store: str, run: str) -> Path:
    return open_store(store, create=True).run_path(run) / "prefect-server.log"


def _show_runs(planned: list[Cell], as_json: bool) -> None:
    rows = []
    for cell in planned:
        actions = [line.action for line in plan(cell.config)]
        rows.append(
            {
                "run": cell.config.name,
                "fields": dict(cell.fields),
                "seed": cell.config.seed,
                "reuse": actions.count("reuse"),
                "compute": actions.count("run"),
            }
        )
    if as_json:
        print_json(rows)
        return
    header = ("run", "grid", "seed", "in the store", "to compute")
    shown = [
        [cell.config.name, cell.label(), *(str(row[name]) for name in ("seed", "reuse", "compute"))]
        for cell, row in zip(planned, rows, strict=True)
    ]
    console.print(FittedTable("", header, shown, kept=len(header), left=len(header)))
