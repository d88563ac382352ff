"""Commands ``geb compare``, ``diff``, ``lineage`` and ``fields``: runs, artifacts, settings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from flows.commands.common import (
    AsJson,
    RunName,
    StorePath,
    answer,
    answer_comparison,
    complete_run,
    configured_run,
    console,
    print_json,
)
from flows.execution.plan import differences
from flows.execution.run_record import RunRecord, run_of
from flows.pipeline.config import RunConfig
from flows.pipeline.fields import run_rows
from flows.report.lineage import Ancestor, lineage_of, write_page
from flows.report.table import FittedTable
from stages.contract.errors import UserError
from stages.store.base import Store
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry


def diff(
    first: RunName, second: RunName, store: StorePath = "store", as_json: AsJson = False
) -> None:
    """Compare two runs: their configurations, their metrics, and tests of the differences.

    A model (NAME, NAME@ALIAS, NAME:VERSION) means the run that made it.
    """
    # Imported here, since scipy takes a second to load, and the other commands do without it.
    from flows.report.rows import compared, p_text
    from flows.report.summary import Summary, summarise

    opened = open_store(store)

    def facts(name: str) -> tuple[dict[str, Any], dict[str, Any], Summary]:
        run, _ = run_of(opened, name)
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
    shown = [
        f"iteration {each.iteration}, {each.figure}: {each.first:.3f} → {each.second:.3f}, "
        f"difference {each.shown()}, {p_text(each.adjusted_p_value)}, {each.prompts} prompts"
        for each in tested
    ]
    note = "differences (paired by prompt, 95 % intervals, p by permutation, adjusted by Holm)"
    lines: list[Text] = []
    for title, found in (*changes.items(), (note, shown)):
        lines.append(Text(title, style="bold"))
        lines += [Text(f"  {line}") for line in found or ["the same"]]
    answer(as_json, changes | {"differences": [asdict(each) for each in tested]}, *lines)


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
            f"no field begins with {prefix!r}",
            f"sections: {', '.join(RunConfig.model_fields)}",
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
        typer.Argument(
            metavar="RUN RUN…",
            help="Runs or models; others stand against the first.",
            autocompletion=complete_run,
        ),
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
    # Imported here: the other commands do without scipy and matplotlib.
    from flows.report.comparison import compare_runs

    answer_comparison(as_json, compare_runs(open_store(store), runs, name))


# Most artifacts that are named if the beginning of a key fits several.
_SHOWN = 10


def lineage(
    artifact: Annotated[
        str, typer.Argument(metavar="ARTIFACT", help="A model, a key, or its beginning.")
    ],
    store: StorePath = "store",
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write them into a page, with links."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the ancestors of an artifact, each once, down to the inputs from outside."""
    opened = open_store(store)
    ancestors = lineage_of(opened, *_named(opened, artifact))
    if html is not None:
        write_page(ancestors, html)
        typer.echo(str(html.absolute()), err=as_json)
    if as_json:
        print_json([asdict(each) for each in ancestors])
    elif html is None:
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


COMMANDS = (compare, diff, lineage, fields)
