"""Commands ``geb compare``, ``diff``, ``lineage`` and ``fields``: runs, artifacts, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from flows.commands.common import AsJson, RunName, StorePath, configured_run, console, print_json
from flows.execution.plan import differences
from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.fields import field_rows
from flows.report.lineage import Ancestor, lineage_of, write_graph
from flows.report.table import FittedTable
from stages.contract.errors import UserError
from stages.contract.store import Store
from stages.contract.stores import open_store


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    for command in (compare, diff, lineage, fields):
        app.command()(command)


def diff(
    first: RunName, second: RunName, store: StorePath = "store", as_json: AsJson = False
) -> None:
    """Compare two runs: their configurations, their metrics, and tests of the differences."""
    # Imported here, since scipy takes a second to load, and the other commands do without it.
    from flows.report.between import compared
    from flows.report.summary import Summary, summarise

    opened = open_store(store)

    def facts(run: str) -> tuple[dict[str, Any], dict[str, Any], Summary]:
        config = json.loads(configured_run(store, run).to_json())
        found = summarise(RunRecord.existing(opened, run))
        rows = [{**row, "intervals": None} for row in found.rows]
        return config, {f"iteration {row['iteration']}": row for row in rows}, found

    (config_before, metrics_before, before), (config_now, metrics_now, now) = (
        facts(first),
        facts(second),
    )
    last = min(before.config.iterations, now.config.iterations)
    tested = compared(before, now, range(1, last + 1))
    changes = {
        "configuration": list(differences(config_before, config_now)),
        "metrics": list(differences(metrics_before, metrics_now)),
    }
    if as_json:
        print_json(changes | {"differences": [each.to_json() for each in tested]})
        return
    shown = [f"iteration {each.iteration}, {each.figure}: {each}" for each in tested]
    note = "differences (paired by prompt, 95 % intervals, p by permutation, adjusted by Holm)"
    for title, lines in (*changes.items(), (note, shown)):
        console.print(f"[bold]{title}[/]")
        for line in lines or ["the same"]:
            console.print(f"  {line}", markup=False)


def fields(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only those that begin so: `train`.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the fields of the configuration with their defaults and meanings."""
    rows = [row for row in field_rows(RunConfig) if row.name.startswith(prefix)]
    if not rows:
        raise UserError(
            f"no field begins with {prefix!r}",
            f"sections: {', '.join(RunConfig.model_fields)}",
        )
    if as_json:
        print_json(
            {
                row.name: {
                    "required": row.default is None,
                    "default": None if row.default is None else json.loads(row.default),
                    "values": row.kind,
                    "unit": row.unit,
                    "meaning": row.meaning,
                }
                for row in rows
            }
        )
        return
    shown = [(row.name, row.default or "required", row.meaning) for row in rows]
    console.print(FittedTable("", ("field", "default", "meaning"), shown, kept=3, left=3))


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


# Of artifacts that a beginning of a key fits.
_SHOWN = 10


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
