"""What a store holds that nothing refers to any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flows.execution.run_record import RunRecord, recorded
from stages.contract.errors import DamagedArtifactError
from stages.contract.registry import ModelRegistry
from stages.contract.store import Held, Store


@dataclass(frozen=True)
class Garbage:
    """One thing that can go."""

    held: Held
    why: str

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"path": self.held.place, "why": self.why, "bytes": self.held.bytes}


def collect(store: Store) -> list[Garbage]:
    """Finds artifacts that no run's last steps and no registered model need, and leftovers.

    What a needed artifact was made of is needed too. A key that is being computed is left alone.
    """
    found = list(_garbage(store))
    return sorted(found, key=lambda each: each.held.bytes, reverse=True)


def remove(store: Store, garbage: list[Garbage]) -> None:
    """Deletes what :func:`collect` found."""
    for each in garbage:
        store.remove(each.held)


def _garbage(store: Store) -> Iterator[Garbage]:
    needed = _needed(store)
    present = set(store.artifacts())
    for held in store.held():
        why = _why(held, needed, present)
        if why and (held.kind == "aside" or store.lease(held.stage, held.key).holder() is None):
            yield Garbage(held, why)


def _why(held: Held, needed: set[tuple[str, str]], present: set[tuple[str, str]]) -> str:
    """Why something can go if its key is not being computed; empty if it cannot."""
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


def _needed(store: Store) -> set[tuple[str, str]]:
    waiting = [
        (step.stage, step.key) for run in recorded(store) for step in RunRecord(store, run).steps()
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
            manifest = store.manifest(stage, key)
        except DamagedArtifactError:
            continue
        if manifest is None:
            continue
        for group in manifest.inputs.values():
            waiting += [
                (each["stage"], each["key"]) for each in group if each["kind"] == "artifact"
            ]
    return needed
