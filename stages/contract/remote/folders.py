"""Synchronisation of small records between a store's local folder and its bucket.

Run records, the model registry and logs. An index beside the store remembers which content of the
bucket each local file is a copy of, so that only what changed travels; without it more does.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages.contract.atomic import atomic_path, write_atomically
from stages.contract.remote.bucket import PARALLEL_TRANSFERS, Bucket, Entry, Version
from stages.contract.remote.errors import ConflictError

_INDEX = ".synced.json"
_RECORDS = ".json"


class SyncedFolders:
    """Copies records between a local folder and a bucket. Safe to use from several threads.

    Args:
        bucket: The store's bucket.
        root: The store's local folder.
    """

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self._bucket = bucket
        self._root = root
        self._lock = threading.Lock()
        self._index = self._read_index()

    def pull(self, folder: str, *, exact: bool = False) -> None:
        """Brings the local records of a folder to what the bucket has.

        Args:
            folder: Relative to the store.
            exact: Remove local records that the bucket does not have.
        """
        listed = {
            f"{folder}/{name}": entry
            for name, entry in self._bucket.list(folder).items()
            if name.endswith(_RECORDS)
        }
        with self._lock:
            stale = [name for name, entry in listed.items() if entry.etag != self._etag(name)]
            for name, found in self._bucket.get_all(stale).items():
                self._write(name, found.data, listed[name])
                self._remember(name, found.version.etag, self._stat(name))
            known = {name for name in self._index if name.startswith(f"{folder}/")}
            here = self._local_records(folder) if exact else known
            for name in here - set(listed):
                (self._root / name).unlink(missing_ok=True)
                self._index.pop(name, None)
            if stale:
                self._write_index()

    def push(self, names: list[str]) -> None:
        """Uploads files that differ from what the bucket was last known to have."""

        def upload(name: str) -> None:
            data, state = self._read(name)
            self._remember(name, self._bucket.put(name, data).etag, state)

        with self._lock, ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool:
            list(pool.map(upload, [name for name in names if self._etag(name) is None]))

    def push_changes(self, folder: str) -> None:
        """Uploads changed records of a folder, on condition that the bucket has what was pulled.

        Raises:
            ConflictError: Another process changed a record since.
        """
        with self._lock:
            for name in sorted(self._local_records(folder)):
                if self._etag(name) is None:
                    data, state = self._read(name)
                    before = self._pulled(name)
                    put = self._bucket.put(name, data, absent=before is None, replaces=before)
                    self._remember(name, put.etag, state)

    def _pulled(self, name: str) -> Version | None:
        """The version in the bucket if it is the one that was pulled; None if none was."""
        if name not in self._index:
            return None
        found = self._bucket.get(name)
        if found is None or found.version.etag != self._index[name][0]:
            raise ConflictError(f"{self._bucket.url}/{name} has been changed meanwhile")
        return found.version

    def _etag(self, name: str) -> str | None:
        """ETag of the content that the local file has, if it is one of the bucket."""
        etag, *stat = self._index.get(name, ("", 0, 0))
        return etag if stat == self._stat(name) else None

    def _remember(self, name: str, etag: str, state: list[int]) -> None:
        size, changed = state
        self._index[name] = (etag, size, changed)

    def _read(self, name: str) -> tuple[bytes, list[int]]:
        """Content of a local file, and a state that it does not have any more once it changes."""
        # First the state: of a file that is replaced while it travels the next push brings the new
        # content.
        state = self._stat(name)
        return (self._root / name).read_bytes(), state

    def _stat(self, name: str) -> list[int]:
        try:
            stat = (self._root / name).stat()
        except FileNotFoundError:
            return [-1, -1]
        return [stat.st_size, stat.st_mtime_ns]

    def _local_records(self, folder: str) -> set[str]:
        return {
            path.relative_to(self._root).as_posix()
            for path in (self._root / folder).rglob(f"*{_RECORDS}")
            if not path.name.startswith(".")
        }

    def _write(self, name: str, data: bytes, entry: Entry) -> None:
        with atomic_path(self._root / name) as scratch:
            scratch.write_bytes(data)
            # Lists of runs are in the order in which they were started, on any host.
            os.utime(scratch, (entry.modified, entry.modified))

    def _read_index(self) -> dict[str, tuple[str, int, int]]:
        try:
            found = json.loads((self._root / _INDEX).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return {name: (etag, size, changed) for name, (etag, size, changed) in found.items()}

    def _write_index(self) -> None:
        write_atomically(self._root / _INDEX, json.dumps(self._index))
