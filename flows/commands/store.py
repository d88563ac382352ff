"""Commands ``geb verify`` and ``geb gc``: health and size of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.commands.common import AsJson, StorePath, console, print_json
from flows.commands.gc import Garbage, collect, remove
from flows.pipeline.external import inputs_resolved_once, resolve
from stages.contract.adapters import BASE, base_of_adapter
from stages.contract.errors import DamagedArtifactError, UserError
from stages.contract.manifest import Manifest
from stages.contract.request import ArtifactInput, HubInput
from stages.contract.store import Store
from stages.contract.stores import open_store


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    app.command()(verify)
    app.command()(gc)


def verify(store: StorePath = "store", as_json: AsJson = False) -> None:
    """Hash every file of every artifact; exit code 1 when one is damaged, or lacks its base."""
    opened = open_store(store)
    keys = list(opened.artifacts())
    # The base outside the store that many adapters share is hashed once.
    with inputs_resolved_once():
        faults = {f"{stage}/{key}": _fault(opened, stage, key) for stage, key in keys}
    damaged = {name: fault for name, fault in faults.items() if fault is not None}
    if as_json:
        print_json({"artifacts": len(keys), "damaged": damaged})
    else:
        for message in damaged.values():
            console.print(f"[red]✗[/] {escape(message)}")
        console.print(f"{len(keys)} artifacts, {len(damaged)} damaged")
    if damaged:
        if not as_json:
            console.print("a run that needs a damaged artifact sets it aside and computes it again")
        raise typer.Exit(1)


def _fault(store: Store, stage: str, key: str) -> str | None:
    try:
        # None where `geb gc` has removed it meanwhile.
        if (artifact := store.load(stage, key)) is None:
            return None
        store.verify(artifact)
        return fault_of_base(store, artifact.manifest)
    except DamagedArtifactError as error:
        return str(error)


def gc(
    store: StorePath = "store",
    delete: Annotated[bool, typer.Option("--delete", help="Delete; else only list.")] = False,
    older_than: Annotated[
        float,
        typer.Option(min=0, metavar="HOURS", help="Only what was not written to for so long."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """List (or delete) what no run and no registered model refers to."""
    opened = open_store(store)
    garbage = collect(opened, older_than * 3600)
    if delete:
        garbage = remove(opened, garbage)
    total = sum(each.held.bytes for each in garbage)
    if as_json:
        print_json([each.to_json() for each in garbage])
        return
    for each in garbage:
        console.print(f"{_size(each):>10}  {escape(each.held.place)}  [dim]{each.why}[/]")
    done = "deleted" if delete else "can go; --delete removes them"
    console.print(f"{len(garbage)} things, {total / 2**20:.1f} MiB, {done}")


def _size(garbage: Garbage) -> str:
    return f"{garbage.held.bytes / 2**20:.1f} MiB"


def fault_of_base(store: Store, manifest: Manifest) -> str | None:
    """Fault of the base of an artifact's adapter; None where all is well, or there is no adapter.

    The files of a base in the store are hashed as those of its own artifact. A repository of the
    hub is pinned by its commit, and not asked for.
    """
    for name in manifest.files:
        path, _, file = name.rpartition("/")
        base = base_of_adapter(manifest, path) if file == BASE else None
        if base is None or isinstance(base, HubInput):
            continue
        adapter = f"the adapter {manifest.stage}/{manifest.key[:12]}"
        if isinstance(base, ArtifactInput):
            place = f"{base.stage}/{base.key[:12]}/{base.path}"
            made = store.manifest(base.stage, base.key)
            now = made.digest(base.path) if made and made.files_at(base.path) else None
        else:
            place = base.location
            try:
                now = resolve(place, "model").digest if Path(place).exists() else None
            except UserError as error:
                return f"{adapter} lacks its base: {error.message}"
        if now is None:
            return f"{adapter} lacks its base: there is no {place}"
        if now != base.digest:
            return f"{adapter} goes over the base with the digest {base.digest}: {place} has {now}"
    return None
