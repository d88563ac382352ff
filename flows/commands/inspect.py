"""Commands ``geb diff`` and ``geb fields``: settings and results side by side, and all settings."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from flows.commands.common import AsJson, RunName, StorePath, configured_run, console, print_json
from flows.execution.plan import differences
from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.fields import field_rows
from flows.report.fitting import FittedTable
from stages.contract.errors import UserError
from stages.contract.stores import open_store


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    for command in (diff, fields):
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
