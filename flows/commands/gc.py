"""Garbage collection of a store: artifacts and leftovers that nothing refers to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from flows.commands.needed import Needed
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
