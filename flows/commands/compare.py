"""Command ``geb compare``: finished runs side by side."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.common import AsJson, StorePath, console, print_json
from stages.contract.stores import open_store


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(compare)


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN…", help="Runs; the others stand against the first."),
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the comparison; of the runs if unset.")
    ] = "",
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Compare runs: tables with intervals and p-values, curves; HTML, PNG, LaTeX, CSV, JSON."""
    # Imported here: the other commands do without scipy and matplotlib.
    from flows.report.comparison_files import compare_runs
    from flows.report.comparison_tables import tables

    found = compare_runs(open_store(store), runs, name)
    if as_json:
        print_json(found.comparison.to_json() | {"page": found.page})
        return
    for each in tables(found.comparison):
        table = Table(title=each.title, title_justify="left", box=None, pad_edge=False)
        for place, title in enumerate(each.header):
            table.add_column(title, justify="right" if place else "left")
        for row in each.rows:
            table.add_row(*map(escape, row))
        console.print(table)
        console.print(f"[dim]{each.note}[/]\n")
    console.print(f"page  {found.page}", markup=False)
