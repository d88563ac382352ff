"""Commands ``geb diff`` and ``geb fields``: settings and results side by side, and all settings."""

from __future__ import annotations

import json
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BaseModel
from rich.markup import escape
from rich.table import Table

from flows.commands.common import AsJson, RunName, StorePath, configured_run, console, print_json
from flows.execution.plan import differences
from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
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
    rows = [row for row in _fields(RunConfig, "") if row[0].startswith(prefix)]
    if not rows:
        raise UserError(
            f"no field begins with {prefix!r}",
            f"sections: {', '.join(RunConfig.model_fields)}",
        )
    if as_json:
        print_json(
            {
                name: {
                    "required": default is None,
                    "default": None if default is None else json.loads(default),
                    "meaning": meaning,
                }
                for name, default, meaning in rows
            }
        )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("field", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for name, default, meaning in rows:
        table.add_row(*(escape(each) for each in (name, default or "required", meaning)))
    console.print(table)


def _fields(model: type[BaseModel], prefix: str) -> list[tuple[str, str | None, str]]:
    """Name, default as JSON (None where a value is required), and meaning of every field."""
    rows: list[tuple[str, str | None, str]] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += _fields(kind, f"{prefix}{name}.")
            continue
        default = json.dumps(field.get_default(call_default_factory=True), default=str)
        meaning = " ".join((field.description or "").split())
        rows.append((f"{prefix}{name}", None if field.is_required() else default, meaning))
        # Sections under names of one's own, such as `suites`.
        section = get_args(kind)[-1] if get_origin(kind) is dict else None
        if isinstance(section, type) and issubclass(section, BaseModel):
            rows += _fields(section, f"{prefix}{name}.NAME.")
    return rows
