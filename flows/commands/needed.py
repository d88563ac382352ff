"""Keys that the store's runs and registered models need, read again only where records changed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from flows.execution.run_record import RunRecord
from stages.contract.errors import DamagedArtifactError
from stages.contract.registry import ModelRegistry
from stages.contract.store import Store

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
