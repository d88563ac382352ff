"""Space used in a store, for garbage collection."""

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

EntryKind = Literal["artifact", "work", "scratch", "aside"]
SCRATCH = ".scratch-"
"""Start of the name of a folder in which an artifact is written, before its key."""
# Levels down to the entries of each folder.
LEVELS = {"artifacts": 3, "work": 3, "quarantine": 2, "slurm": 3}
# A run whose orchestrator has died has been resumed by then, and has read the end of its job.
_READ_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class StoreEntry:
    """A file or folder in the store, with its size.

    Attributes:
        kind: An artifact, the state of an attempt, what a killed one left, or what was set aside.
        stage: Its stage, and ``key`` its key; empty if unknown.
        place: Where it is, below the store's root.
    """

    kind: EntryKind
    stage: str
    key: str
    place: str
    bytes: int


def entries_of(
    contents: Iterable[tuple[str, int, float]],
    artifacts: Collection[tuple[str, str]],
    left_seconds: float,
) -> Iterator[StoreEntry]:
    """Yields the entries that contents of a store belong to.

    Args:
        contents: Name, bytes and time of the last write of each file below :data:`LEVELS`.
        artifacts: Stages and keys of the whole artifacts.
        left_seconds: Younger leftovers of attempts are left out.
    """
    sizes: dict[str, int] = {}
    written: dict[str, float] = {}
    ended = {}
    for name, size, time_written in contents:
        parts = name.split("/")
        level = LEVELS[parts[0]]
        if len(parts) >= level:
            place = "/".join(parts[:level])
            sizes[place] = sizes.get(place, 0) + size
            written[place] = max(written.get(place, 0.0), time_written)
            if name == f"{place}/status":
                ended[place] = time_written
    now = time.time()
    for place, size in sizes.items():
        root, stage, *keys = place.split("/")
        if not keys:
            yield StoreEntry("aside", "", "", place, size)
        elif root == "artifacts" and (stage, keys[0]) in artifacts:
            yield StoreEntry("artifact", stage, keys[0], place, size)
        elif root == "slurm" and ended.get(place, now) > now - _READ_SECONDS:
            # Without a status the job may still run.
            continue
        # The clock of a file server may be ahead.
        elif not left_seconds or now - written[place] >= left_seconds:
            kind: EntryKind = "work" if root == "work" else "scratch"
            key = keys[0].removeprefix(SCRATCH).partition("-")[0]
            yield StoreEntry(kind, stage, key, place, size)
