"""Commands ``geb compare``, ``lineage`` and ``fields``: runs, artifacts, settings."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from flows.commands.common import (
    AsJson,
    StorePath,
    answer,
    answer_comparison,
    console,
    print_json,
)
from flows.pipeline.config import RunConfig
from flows.pipeline.fields import run_rows
from flows.report.lineage import Ancestor, lineage_of
from flows.report.table import FittedTable
from stages.contract.errors import UserError
from stages.store.base import Store
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry


def fields(
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Only those that begin so: `train`.")
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
            "default": None if row.default is None else json.loads(row.default),
            "values": row.kind,
            "meaning": row.meaning,
        }
        for row in rows
    }
    shown = [(row.name, row.default or "required", row.meaning) for row in rows]
    header = ("field", "default", "meaning")
    answer(as_json, document, FittedTable("", header, shown, kept=3, left=3))


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN…", help="Runs or models, the others against the first."),
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the comparison; of the runs if unset.")
    ] = "",
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Compare runs: tables with intervals and p-values, curves; HTML, PNG, LaTeX, CSV, JSON.

    A model (NAME, NAME@ALIAS, NAME:VERSION) of a run's last iteration means that run.
    """
    from flows.report.comparison_files import compare_runs

    answer_comparison(as_json, compare_runs(open_store(store), runs, name))


# Most artifacts that are named if the beginning of a key fits several.
_SHOWN = 10


def lineage(
    artifact: Annotated[
        str, typer.Argument(metavar="ARTIFACT", help="A model, a key, or its beginning.")
    ],
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Show the ancestors of an artifact, each once, down to the inputs from outside."""
    opened = open_store(store)
    ancestors = lineage_of(opened, *_named(opened, artifact))
    if as_json:
        print_json([asdict(each) for each in ancestors])
    else:
        _print(ancestors)


def _named(store: Store, artifact: str) -> tuple[str, str]:
    """Stage and key of an artifact: of a model's checkpoint, or by the beginning of its key."""
    registry = ModelRegistry(store)
    if registry.has(artifact):
        checkpoint = registry.find(artifact).checkpoint
        return checkpoint.stage, checkpoint.key
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
