"""Command ``geb bandit``: the bandit experiment."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Annotated

import typer

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
from flows.report.table import FittedTable
from stages.contract.stores import open_store

ConfigPath = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="Configuration file (YAML); the paper's size without."),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Copy table and figures there as well.")
]


def register(app: typer.Typer) -> None:
    """Adds this command."""
    app.command("bandit")(bandit)


def bandit(
    config: ConfigPath = None,
    overrides: Overrides = None,
    store: ConfigStore = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run the paper's toy experiment: does a bonus find the best arm of a bandit?"""
    require_folder(out)
    quiet_prefect()
    signal.signal(signal.SIGTERM, interrupt)
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from experiments.bandit import BanditConfig
    from experiments.bandit import bandit as bandit_flow
    from flows.execution.console import ConsoleObserver
    from flows.execution.observer import observing
    from flows.pipeline.loading import load_settings
    from flows.standing.server import ensure_prefect_server

    settings = load_settings(config, chosen(overrides, store=store), BanditConfig)
    watched = messages() if as_json else console
    folder = open_store(settings.store, create=True).run_path(settings.name)
    ensure_prefect_server(folder / "prefect-server.log", as_it_is(watched))
    with ConsoleObserver(watched, 1) as observer, observing(observer):
        artifact = bandit_flow(settings)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name in artifact.manifest.files:
            shutil.copyfile(artifact.file(name), out / name)
    text = artifact.file("table.md").read_text()
    if as_json:
        metrics = artifact.read_json("metrics.json")
        print_json({"artifact": artifact.address(), "table": text, **metrics})
        return
    if console.is_terminal:
        header, _, *rows = map(_cells, text.splitlines())
        console.print(FittedTable("", header, rows, kept=3, left=7))
    else:
        typer.echo(text)
    console.print(f"figures  {artifact.address()}", markup=False)


def _cells(line: str) -> list[str]:
    """Cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
