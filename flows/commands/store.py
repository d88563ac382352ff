"""Commands ``geb verify`` and ``geb gc``: damage in a store, and what nothing in it refers to."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, NamedTuple

import typer

from flows.commands.common import AsJson, StorePath, answer
from flows.execution.run_record import RunRecord, recorded
from stages.contract.errors import EXIT_FAILED, DamagedArtifactError
from stages.contract.manifest import Manifest
from stages.contract.request import ArtifactInput
from stages.store.base import Store
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry
from stages.store.usage import StoreEntry

_Name = tuple[str, str]
"""Stage and key of an artifact."""


def verify(store: StorePath = "store", as_json: AsJson = False) -> None:
    """Hash every file of every artifact; exit code 1 when one is damaged."""
    opened = open_store(store)
    keys = list(opened.artifacts())
    damaged = {}
    for stage, key in keys:
        try:
            artifact = opened.load(stage, key)
            # `geb gc` may have removed it meanwhile.
            if artifact is not None:
                opened.verify(artifact)
        except DamagedArtifactError as error:
            damaged[f"{stage}/{key}"] = str(error)
    shown = [*damaged.values(), f"{len(keys)} artifacts, {len(damaged)} damaged"]
    if damaged:
        shown.append(
            "delete the folder of a damaged artifact: a run that needs it computes it again"
        )
    answer(as_json, {"artifacts": len(keys), "damaged": damaged}, *shown)
    if damaged:
        raise typer.Exit(EXIT_FAILED)


def gc(
    store: StorePath = "store",
    delete: Annotated[bool, typer.Option("--delete", help="Delete; else only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List (or delete) what no run and no registered model refers to."""
    opened = open_store(store)
    garbage = collect_garbage(opened)
    if delete:
        garbage = remove_garbage(opened, garbage)
    total = sum(item.entry.bytes for item in garbage)
    document = []
    shown = []
    for entry, why in garbage:
        document.append({"path": entry.place, "why": why, "bytes": entry.bytes})
        shown.append(f"{_mib(entry.bytes):>10}  {entry.place}  {why}")
    done = "deleted" if delete else "can go; --delete removes it"
    answer(as_json, document, *shown, f"{_mib(total)} {done}" if garbage else "nothing can go")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


class Garbage(NamedTuple):
    """An artifact or a leftover that can be removed, and why."""

    entry: StoreEntry
    why: str


def collect_garbage(store: Store) -> list[Garbage]:
    """Finds artifacts that no run's last steps and no registered model need, and leftovers.

    The inputs of a needed artifact are needed too. A key that is being computed is left alone.
    """
    # Listed first: what a run makes or comes to need meanwhile is then among the needed.
    listed = list(store.entries())
    present = set(store.artifacts())
    needed = _needed(store, store.manifest)
    garbage = []
    for entry in listed:
        if why := _why(store, entry, needed, present):
            garbage.append(Garbage(entry, why))
    return sorted(garbage, key=lambda item: item.entry.bytes, reverse=True)


def remove_garbage(store: Store, garbage: list[Garbage]) -> list[Garbage]:
    """Deletes the garbage that no run has come to need, and returns it."""
    removed = []
    # Manifests never change, and each is a request to a bucket.
    manifest = functools.cache(store.manifest)
    for item in garbage:
        # Runs record the keys that they want before they compute or read them.
        if _why(store, item.entry, _needed(store, manifest), set(store.artifacts())):
            store.remove(item.entry)
            removed.append(item)
    return removed


def _why(store: Store, entry: StoreEntry, needed: set[_Name], present: set[_Name]) -> str:
    """Reason why an entry can be removed; empty if it cannot."""
    name = entry.stage, entry.key
    match entry.kind:
        case "aside":
            return "set aside"
        case "artifact":
            why = "" if name in needed else "no run and no model refers to it"
        case "work":
            is_resumable = name in needed and name not in present
            why = "" if is_resumable else "state of an attempt that no run will go on with"
        case "scratch":
            # It may have become an artifact since the store was listed.
            place = f"artifacts/{entry.stage}/{entry.key}"
            is_artifact = entry.place == place and name in present
            why = "" if is_artifact else "left by an attempt that was killed"
    return why if why and store.lease(*name).holder() is None else ""


def _needed(store: Store, manifest_of: Callable[[str, str], Manifest | None]) -> set[_Name]:
    """Keys of all runs' last steps and registered models, and of all their inputs.

    Raises:
        DamagedRecordError: A record cannot be read, so its needs are unknown.
    """
    versions = ModelRegistry(store).all_versions()
    waiting = [(version.checkpoint.stage, version.checkpoint.key) for version in versions]
    for run in recorded(store):
        steps = RunRecord(store, run, refresh=False).steps(strict=True)
        waiting += [(step.stage, step.key) for step in steps]
    needed: set[_Name] = set()
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            with suppress(DamagedArtifactError):
                manifest = manifest_of(*name)
                for source in manifest.sources() if manifest else ():
                    if isinstance(source, ArtifactInput):
                        waiting.append((source.stage, source.key))
    return needed
