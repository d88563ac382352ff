"""Garbage collection of a store: artifacts and leftovers that nothing refers to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.execution.run_record import RunRecord
from stages.contract.errors import DamagedArtifactError
from stages.contract.registry import ModelRegistry
from stages.contract.store import Held, Store

# Nobody takes so long to write a record.
_WRITE_SECONDS = 3600.0


@dataclass(frozen=True)
class Garbage:
    """An artifact or a leftover that can be removed."""

    held: Held
    why: str

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {"path": self.held.place, "why": self.why, "bytes": self.held.bytes}


def collect(store: Store, older_than: float = 0.0) -> list[Garbage]:
    """Finds artifacts that no run's last steps and no registered model need, and leftovers.

    What a needed artifact was made of is needed too. A key that is being computed is left alone.

    Args:
        store: The store.
        older_than: Least time in seconds since something was last written.
    """
    # Listed first: what a run makes or comes to need meanwhile is then among the needed.
    listed = list(store.held())
    present = {(each.stage, each.key) for each in listed if each.kind == "artifact"}
    needed = Needed(store)
    needed.update()
    found = [
        Garbage(held, why)
        for held in listed
        if (why := _why(held, needed.keys(), present))
        and not _is_computed(store, held)
        and _is_older(held, older_than)
    ]
    return sorted(found, key=lambda each: each.held.bytes, reverse=True)


def remove(store: Store, garbage: list[Garbage]) -> list[Garbage]:
    """Deletes what :func:`collect` found, unless a run has come to need it since.

    Returns:
        What was deleted.
    """
    removed = []
    needed, present = Needed(store), set(store.artifacts())
    for each in garbage:
        # A run writes down the keys that it wants before it computes or reads them.
        if needed.update():
            present = set(store.artifacts())
        if _why(each.held, needed.keys(), present) and not _is_computed(store, each.held):
            store.remove(each.held)
            removed.append(each)
    return removed


def _is_older(held: Held, seconds: float) -> bool:
    # Somebody may write a record just now: a temporary file has no lease that would tell.
    least = max(seconds, _WRITE_SECONDS) if held.kind == "temporary" else seconds
    return time.time() - held.written >= least


def _is_computed(store: Store, held: Held) -> bool:
    return (
        held.kind not in ("aside", "temporary")
        and store.lease(held.stage, held.key).holder() is not None
    )


def _why(held: Held, needed: set[tuple[str, str]], present: set[tuple[str, str]]) -> str:
    """Reason why an entry can be removed if its key is not being computed; empty if it cannot."""
    name = held.stage, held.key
    match held.kind:
        case "artifact":
            return "" if name in needed else "no run and no model refers to it"
        case "work":
            wanted = name in needed and name not in present
            return "" if wanted else "state of an attempt that no run will go on with"
        case "scratch":
            return "left by an attempt that was killed"
        case "aside":
            return "set aside"
        case "temporary":
            return "a record that was being written when its writer was killed"


Name = tuple[str, str]
"""Stage and key of an artifact."""

# Two changes of a folder within a tick of the kernel's clock leave it one time of modification.
_TICK_SECONDS = 0.1


class Needed:
    """Keys of all runs' last steps and registered models, and of all that they were made of.

    A store may hold hundreds of runs, and each artifact that is deleted asks anew.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._folders: dict[str, int] = {}
        self._roots: dict[str, list[Name]] = {}
        self._inputs: dict[Name, list[Name]] = {}
        self._needed: set[Name] = set()

    def update(self) -> bool:
        """Reads the records that have changed since the last call; True where there were any.

        Raises:
            DamagedRecordError: A record cannot be read, so that nobody knows what it needs.
        """
        self._store.refresh("runs")
        self._store.refresh("models")
        # Before the records are read: a change meanwhile is seen by the next call.
        now = time.time()
        folders = dict(_modified(self._store.root))
        changed = {
            place
            for place in folders.keys() | self._folders.keys()
            if folders.get(place) != self._folders.get(place)
        }
        changed |= {place for place, ns in folders.items() if abs(now - ns / 1e9) < _TICK_SECONDS}
        self._folders = folders
        # Of models, any one stands for all of them.
        groups = {place if place.startswith("runs/") else "models" for place in changed}
        for group in groups:
            self._roots[group] = list(_roots(self._store, group))
        if groups:
            self._needed = self._closure()
        return bool(groups)

    def keys(self) -> set[Name]:
        """The keys, as of the last update."""
        return self._needed

    def _closure(self) -> set[Name]:
        waiting = [name for names in self._roots.values() for name in names]
        needed: set[Name] = set()
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += self._inputs_of(name)
        return needed

    def _inputs_of(self, name: Name) -> list[Name]:
        if name not in self._inputs:
            manifest = None
            with suppress(DamagedArtifactError):
                manifest = self._store.manifest(*name)
            if manifest is None:
                # It may come yet.
                return []
            self._inputs[name] = list(_artifacts(manifest.inputs))
        return self._inputs[name]


def _artifacts(inputs: Mapping[str, Iterable[Mapping[str, str]]]) -> Iterator[Name]:
    for group in inputs.values():
        yield from ((each["stage"], each["key"]) for each in group if each["kind"] == "artifact")


def _roots(store: Store, group: str) -> Iterator[Name]:
    if group == "models":
        for version in ModelRegistry(store).all_versions():
            yield version.checkpoint.stage, version.checkpoint.key
        return
    for step in RunRecord(store, group.removeprefix("runs/")).steps(strict=True):
        yield step.stage, step.key


def _modified(root: Path) -> Iterator[tuple[str, int]]:
    """Folders of records and their times of modification: a record is renamed into its place."""
    for group, records in (("runs", "steps"), ("models", "versions")):
        with suppress(FileNotFoundError), os.scandir(root / group) as found:
            for each in found:
                with suppress(FileNotFoundError, NotADirectoryError):
                    modified = Path(each.path, records).stat().st_mtime_ns
                    yield f"{group}/{each.name}", modified
