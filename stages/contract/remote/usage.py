"""Space used in a bucket, for garbage collection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stages.contract.remote.bucket import Bucket, Entry
from stages.contract.remote.commits import Commits
from stages.contract.store import Held

_NOTHING = (0, 0.0)


def held(bucket: Bucket, commits: Commits) -> Iterator[Held]:
    """Yields everything that takes room; see :meth:`Store.held`."""
    # First the files: those that are committed while the rest is read are not taken for leftovers.
    used = _usage("artifacts", bucket.list("artifacts"), depth=3)
    there, aside = commits.all_there(), commits.all_aside()
    for (stage, key), commit in there.items():
        yield Held("artifact", stage, key, commit.folder, *used.pop(commit.folder, _NOTHING))
    for name, damaged in aside.items():
        yield Held(
            *("aside", "", "", name),
            *(used.pop(damaged.folder, _NOTHING) if damaged else _NOTHING),
        )
    for folder, usage in used.items():
        _, stage, key, _ = folder.split("/")
        yield Held("scratch", stage, key, folder, *usage)
    for folder, usage in _usage("work", bucket.list("work"), depth=2).items():
        _, stage, key = folder.split("/")
        yield Held("work", stage, key, folder, *usage)


def remove(bucket: Bucket, commits: Commits, gone: Held) -> None:
    """Deletes something that :func:`held` told of; the commit first, then its files."""
    folder = gone.place
    if gone.kind == "artifact":
        commits.delete(gone.stage, gone.key)
    if gone.kind == "aside":
        commit = commits.all_aside().get(gone.place)
        bucket.delete([gone.place])
        if commit is None:
            return
        folder = commit.folder
    bucket.delete(f"{folder}/{name}" for name in bucket.list(folder))


def _usage(root: str, listed: Mapping[str, Entry], *, depth: int) -> dict[str, tuple[int, float]]:
    """Bytes and time of the last write of each folder that is ``depth`` levels below ``root``."""
    used: dict[str, tuple[int, float]] = {}
    for name, entry in listed.items():
        folder = "/".join([root, *name.split("/")[:depth]])
        size, written = used.get(folder, _NOTHING)
        used[folder] = size + entry.size, max(written, entry.modified)
    return used
