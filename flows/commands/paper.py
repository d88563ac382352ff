"""Command ``geb paper``: the paper's tables and figures, at its size or at that of this machine."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.paper.budget import Budget, budget
from experiments.paper.values import paper_rows
from flows.commands.common import (
    AsJson,
    ConfigStore,
    Overrides,
    as_it_is,
    chosen,
    console,
    print_json,
    require_folder,
)
from flows.commands.run import interrupt, quiet_prefect
from flows.commands.terminal import messages
from flows.pipeline.external import inputs_resolved_once
from flows.pipeline.loading import overrides_of
from flows.planning.show import count
from flows.report.table import FittedTable
from stages.contract.stores import open_store


def register(app: typer.Typer) -> None:
    """Adds this command."""
    app.command("paper")(paper)


def paper(
    scale: Annotated[
        str, typer.Option(metavar="SCALE", help="small: tasks for this machine; full: the paper's.")
    ] = "small",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="NAME", help="An experiment, setting, method or divergence alone."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The first N seeds of each cell alone.")
    ] = None,
    parallel_runs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    overrides: Overrides = None,
    store: ConfigStore = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show cells and budget, and start nothing.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Copy the report as Markdown, with figures."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the paper's tables and figures; whatever the store has already is reused."""
    require_folder(out)
    laid_over = overrides_of(chosen(overrides, store=store))
    rows = paper_rows(scale, only or ())
    watched = messages() if as_json else console
    with inputs_resolved_once():
        expected = budget(rows, laid_over, seeds)
        if dry_run and as_json:
            print_json(expected.to_json(parallel_runs))
            return
        if dry_run:
            console.print(_table(expected))
        for line in expected.lines(parallel_runs):
            watched.print(escape(line))
    if dry_run:
        return
    quiet_prefect()
    signal.signal(signal.SIGTERM, interrupt)
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from experiments.paper.flow import paper as paper_flow
    from experiments.paper.flow import report_name
    from flows.execution.console import LineObserver
    from flows.execution.observer import observing
    from flows.standing.server import ensure_prefect_server

    folder = open_store(expected.store, create=True).run_path(report_name(scale))
    if ui := ensure_prefect_server(folder / "prefect-server.log", as_it_is(watched)):
        watched.print(f"Prefect UI while it runs: {ui}")
    with observing(LineObserver(watched)):
        found = paper_flow(scale, only or [], seeds, parallel_runs, laid_over)
    if out is not None:
        found.copy_to(out)
    if as_json:
        print_json(found.to_json())
        return
    for line in found.findings:
        console.print(line, markup=False)
    console.print(f"report  {found.page}", markup=False)


def _table(expected: Budget) -> FittedTable:
    words = ("experiment", "setting", "method", "divergence", "configuration", "fields")
    header = (*words, "seeds", "runs", "tokens", "steps", "of them shared", "in the store")
    rows = []
    for cell in expected.cells:
        seeds = " ".join(map(str, cell["seeds"])) or "-"
        rows.append(
            [
                *(cell[name] for name in words),
                f"{seeds} (tuning)" if cell["tunes"] else seeds,
                *(str(len(cell["runs"])), count(cell["tokens"])),
                *(str(cell[name]) for name in ("steps", "shared", "cached")),
            ]
        )
    return FittedTable("", header, rows, kept=len(header), left=len(words))
