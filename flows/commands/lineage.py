"""Command ``geb lineage``: the ancestors of an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.commands.common import AsJson, StorePath, console, print_json
from flows.report.lineage import Ancestor, lineage_of, write_graph
from stages.contract.errors import UserError
from stages.contract.store import Store
from stages.contract.stores import open_store

# Of artifacts that a beginning of a key fits.
_SHOWN = 10


def register(app: typer.Typer) -> None:
    """Adds this command."""
    app.command()(lineage)


def lineage(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="A key, or its beginning.")],
    store: StorePath = "store",
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Draw the graph into a page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the ancestors of an artifact, each once, down to the inputs from outside."""
    opened = open_store(store)
    ancestors = lineage_of(opened, *_named(opened, artifact))
    if html is not None:
        write_graph(ancestors, html)
        typer.echo(str(html.absolute()), err=as_json)
    if as_json:
        print_json([each.to_json() for each in ancestors])
    elif html is None:
        _print(ancestors)


def _named(store: Store, artifact: str) -> tuple[str, str]:
    matches = [(stage, key) for stage, key in store.artifacts() if key.startswith(artifact)]
    if len(matches) != 1:
        shown = [f"{stage}/{key[:16]}" for stage, key in matches[:_SHOWN]]
        shown += [f"{len(matches) - _SHOWN} more"] if len(matches) > _SHOWN else []
        found = ", ".join(shown) or "none"
        raise UserError(
            f"{artifact!r} does not name one artifact of {store.location}; it fits: {found}",
            "give more of the key; `geb status RUN` shows the keys of a run",
        )
    return matches[0]


def _print(ancestors: list[Ancestor]) -> None:
    """A line for each artifact and lines for its inputs, which come further down in full."""
    for each in ancestors:
        console.print(f"[bold]{each.stage}[/] {each.key[:12]}  [dim]{escape(each.made_by)}[/]")
        for name, sources in each.inputs.items():
            shown = ", ".join(escape(source.title()) for source in sources)
            console.print(f"  {name}: {shown}")
