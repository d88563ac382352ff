"""Commands ``geb compare`` and ``geb fields``: runs and settings."""

import json
from typing import Annotated

import typer

from flows.commands.common import (
    AsJson,
    StorePath,
    answer,
    answer_comparison,
)
from flows.pipeline.config import RunConfig
from flows.pipeline.fields import run_rows
from flows.report.table import FittedTable
from stages.contract.errors import UserError
from stages.store.opening import open_store


def fields(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only fields with this beginning: `train`.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the fields of the configuration with their defaults and meanings."""
    rows = run_rows(prefix)
    if not rows:
        raise UserError(
            f"no field begins with {prefix!r}", f"sections: {', '.join(RunConfig.model_fields)}"
        )
    document = {
        row.name: {
            "required": row.default is None,
            "default": json.loads(row.default or "null"),
            "values": row.kind,
            "meaning": row.meaning,
        }
        for row in rows
    }
    shown = [(row.name, row.default or "required", row.meaning) for row in rows]
    answer(as_json, document, FittedTable("", ("field", "default", "meaning"), shown, left=3))


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN…", help="Runs, the others against the first."),
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Write a page and a document under this name.")
    ] = "",
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Compare runs: tables with intervals and p-values; with --name also a page with curves."""
    from flows.report.comparison_files import compare_runs

    answer_comparison(as_json, compare_runs(open_store(store), runs, name))
