"""Commands that only read: ``geb status``, ``geb diff``, ``geb lineage``, ``geb fields``."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.table import Table
from rich.tree import Tree

from flows.commands.common import AsJson, RunName, StorePath, configured_run, console, print_json
from flows.execution.plan import differences
from flows.execution.run_record import RunRecord, runs
from flows.pipeline.config import RunConfig
from stages.contract.errors import UserError
from stages.contract.store import Store
from stages.contract.stores import open_store

_COLOURS = {"done": "green", "reused": "cyan", "running": "yellow", "failed": "red"}


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    for command in (status, diff, lineage, fields):
        app.command()(command)


def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run; all if left out.")
    ] = None,
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Show the runs of a store, or the steps of one run."""
    opened = open_store(store)
    found = [RunRecord.existing(opened, each) for each in ([name] if name else runs(opened))]
    records = {run.name: sorted(run.steps(), key=lambda each: each.started) for run in found}
    if as_json:
        print_json(
            {
                run: [each.model_dump(exclude={"key_fields"}) for each in steps]
                for run, steps in records.items()
            }
        )
        return
    table = Table(box=None, pad_edge=False)
    if name is None:
        for column in ("run", "steps", "failed", "last"):
            table.add_column(column)
        for run, steps in records.items():
            failed = sum(each.state == "failed" for each in steps)
            last = max((each.ended or each.started for each in steps), default=0)
            table.add_row(run, str(len(steps)), str(failed), _clock(last))
    else:
        for column in ("step", "state", "seconds", "key", "message"):
            table.add_column(column, overflow="fold")
        for each in records[name]:
            seconds = f"{each.ended - each.started:.1f}" if each.ended else "-"
            state = f"[{_COLOURS[each.state]}]{each.state}[/]"
            message = each.message.splitlines()[0] if each.message else ""
            table.add_row(each.step, state, seconds, each.key[:12], message)
    console.print(table)


def diff(
    first: RunName, second: RunName, store: StorePath = "store", as_json: AsJson = False
) -> None:
    """Compare two runs: their configurations, their metrics, and tests of the differences."""
    # Here, since scipy takes a second to load, and the other commands do without it.
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


def lineage(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="A key, or its beginning.")],
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Show the ancestors of an artifact, down to the inputs from outside."""
    opened = open_store(store)
    matches = [(stage, key) for stage, key in opened.artifacts() if key.startswith(artifact)]
    if len(matches) != 1:
        found = ", ".join(f"{stage}/{key[:16]}" for stage, key in matches) or "none"
        raise UserError(
            f"{artifact!r} does not name one artifact of {opened.location}; it fits: {found}",
            "give more of the key; `geb status RUN` shows the keys of a run",
        )
    line = _ancestry(opened, *matches[0])
    if as_json:
        print_json(line)
        return
    tree = Tree(_title(line))
    _grow(tree, line)
    console.print(tree)


def fields() -> None:
    """List every field of the configuration with its default and its meaning."""
    table = Table(box=None, pad_edge=False)
    for column in ("field", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for name, default, meaning in _fields(RunConfig, ""):
        table.add_row(name, default, meaning)
    console.print(table)


def _fields(model: type[BaseModel], prefix: str) -> list[tuple[str, str, str]]:
    rows = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += _fields(kind, f"{prefix}{name}.")
        else:
            default = json.dumps(field.get_default(call_default_factory=True), default=str)
            rows.append((f"{prefix}{name}", default, " ".join((field.description or "").split())))
    return rows


def _ancestry(store: Store, stage: str, key: str) -> dict[str, Any]:
    manifest = store.manifest(stage, key)
    if manifest is None:
        return {"stage": stage, "key": key, "gone": True, "inputs": {}}
    return {
        "stage": stage,
        "key": key,
        "made_by": {"run": manifest.run, "step": manifest.step, "ended": manifest.ended},
        "inputs": {
            name: [
                _ancestry(store, each["stage"], each["key"]) if each["kind"] == "artifact" else each
                for each in group
            ]
            for name, group in manifest.inputs.items()
        },
    }


def _title(line: dict[str, Any]) -> str:
    if "stage" not in line:
        return f"{line.get('location') or line.get('repo')} [dim]{line['digest'][:20]}[/]"
    made_by = line.get("made_by")
    where = f"{made_by['run']}, {made_by['step']}" if made_by else "gone from the store"
    return f"[bold]{line['stage']}[/] {line['key'][:12]} [dim]{where}[/]"


def _grow(tree: Tree, line: dict[str, Any]) -> None:
    for name, group in line.get("inputs", {}).items():
        for each in group:
            _grow(tree.add(f"{name}: {_title(each)}"), each)


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else "-"
