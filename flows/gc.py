"""What a store holds that nothing refers to any more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.views import RunView, runs
from stages.contract.errors import DamagedArtifactError
from stages.contract.registry import ModelRegistry
from stages.contract.store import Store


@dataclass(frozen=True)
class Garbage:
    """One folder that can go."""

    path: Path
    why: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"path": str(self.path), "why": self.why, "bytes": self.bytes}


def collect(store: Store) -> list[Garbage]:
    """Finds artifacts that no run's last steps and no registered model need, and leftovers.

    What a needed artifact was made of is needed too. A key that is being computed is left alone.
    """
    found = list(_garbage(store))
    return sorted(found, key=lambda each: each.bytes, reverse=True)


def remove(garbage: list[Garbage]) -> None:
    """Deletes what :func:`collect` found."""
    for each in garbage:
        shutil.rmtree(each.path)


def _garbage(store: Store) -> Iterator[Garbage]:
    needed = _needed(store)
    for stage, key in store.artifacts():
        if (stage, key) not in needed and store.lease(stage, key).holder() is None:
            yield _measured(store.artifact_path(stage, key), "no run and no model refers to it")
    for work in (store.root / "work").glob("*/*"):
        stage, key = work.parent.name, work.name
        busy = store.lease(stage, key).holder() is not None
        if not busy and ((stage, key) not in needed or store.artifact_path(stage, key).exists()):
            yield _measured(work, "state of an attempt that no run will go on with")
    for scratch in (store.root / "artifacts").glob("*/.scratch-*"):
        key_start = scratch.name.removeprefix(".scratch-").partition("-")[0]
        leases = (store.root / "leases" / scratch.parent.name).glob(f"{key_start}*")
        names = {lease.name for lease in leases if "." not in lease.name}
        if all(store.lease(scratch.parent.name, name).holder() is None for name in names):
            yield _measured(scratch, "left by an attempt that was killed")
    for aside in (store.root / "quarantine").glob("*"):
        yield _measured(aside, "set aside")


def _needed(store: Store) -> set[tuple[str, str]]:
    waiting = [
        (step.stage, step.key) for run in runs(store) for step in RunView(store, run).steps()
    ]
    waiting += [
        (each.checkpoint.stage, each.checkpoint.key) for each in ModelRegistry(store).all_versions()
    ]
    needed: set[tuple[str, str]] = set()
    while waiting:
        stage, key = waiting.pop()
        if (stage, key) in needed:
            continue
        needed.add((stage, key))
        try:
            artifact = store.load(stage, key)
        except DamagedArtifactError:
            continue
        if artifact is None:
            continue
        for group in artifact.manifest.inputs.values():
            waiting += [
                (each["stage"], each["key"]) for each in group if each["kind"] == "artifact"
            ]
    return needed


def _measured(path: Path, why: str) -> Garbage:
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return Garbage(path, why, size)
