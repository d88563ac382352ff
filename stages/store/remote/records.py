"""Records (runs, models) of a store in a bucket, and their copies in the store's local folder.

A copy has the number of its object's ETag in place of its time's nanoseconds. A record without it
was written by a stage on this host, and is not in the bucket yet.
"""

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.contract.atomic import atomic_path
from stages.contract.digests import in_threads
from stages.contract.errors import ConflictError
from stages.store.locks import exclusive_lock, try_lock
from stages.store.remote.bucket import Bucket, Entry

_SECOND = 10**9
_RECORDS = ".json"
Entries = dict[str, Entry]


class Records:
    """Copies records between a store's local folder and its bucket."""

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self._bucket = bucket
        self._root = root

    def refresh(self, folder: str) -> None:
        """Updates the local records of a folder from the bucket."""
        lock = try_lock(self._changing(folder), shared=True)
        # Records that this host is changing stay as they are until then.
        if lock is not None:
            try:
                there = self._bucket.list(folder)
                if folder == "models":
                    # Records of a killed change never reached the bucket.
                    self._drop_changes(folder, there)
                self._pull(folder, there)
            finally:
                os.close(lock)

    def write(self, path: Path, data: bytes) -> None:
        """Writes a record, into the bucket first: a kill leaves a copy that is out of date."""
        self._keep(path, data, self._bucket.put(self._name(path), data))

    @contextmanager
    def changed(self, folder: str) -> Iterator[None]:
        """Uploads the records that the block changes, if the bucket still has those before.

        Raises:
            ConflictError: Another host changed a record meanwhile.
        """
        with exclusive_lock(self._changing(folder)):
            there = self._bucket.list(folder)
            self._drop_changes(folder, there)
            self._pull(folder, there)
            try:
                yield
                for path in self._changes(folder, there):
                    name = path.relative_to(self._root / folder).as_posix()
                    self._replace(path, there.get(name))
            except BaseException:
                self._drop_changes(folder, there)
                raise

    def _changes(self, folder: str, there: Entries) -> list[Path]:
        """Local records of a folder that differ from the bucket's."""
        start = self._root / folder
        return [
            path
            for path in start.rglob(f"*{_RECORDS}")
            if not _is_copy(path, there.get(path.relative_to(start).as_posix()))
        ]

    def _drop_changes(self, folder: str, there: Entries) -> None:
        for path in self._changes(folder, there):
            path.unlink(missing_ok=True)

    def _pull(self, folder: str, there: Entries) -> None:
        stale = []
        for name, entry in there.items():
            path = self._root / folder / name
            if not name.endswith(_RECORDS):
                continue
            if not _is_copy(path, entry):
                stale.append(f"{folder}/{name}")
            elif path.stat().st_mtime_ns // _SECOND < int(entry.modified):
                # The same content was written again. The time only orders runs, and the file may be
                # another user's.
                with suppress(OSError):
                    _set_time(path, entry.modified, entry.etag)
        in_threads(self._fetch, stale)

    def _fetch(self, name: str) -> None:
        entry = self._bucket.get(name)
        # It may have gone since it was listed.
        if entry is not None:
            self._keep(self._root / name, entry.data, entry.etag, entry.modified)

    def _replace(self, path: Path, entry: Entry | None) -> None:
        """Uploads a record if the bucket has what was listed, or still nothing."""
        name = self._name(path)
        present = self._bucket.get(name) if entry else None
        if entry and (present is None or present.etag != entry.etag):
            raise ConflictError(f"{self._bucket.url}/{name} has been changed meanwhile; try again")
        data = path.read_bytes()
        self._keep(path, data, self._bucket.put(name, data, absent=not entry, replaces=present))

    def _keep(self, path: Path, data: bytes, etag: str, modified: float | None = None) -> None:
        """Makes a local record the copy of the object that has this ETag."""
        with atomic_path(path) as scratch:
            scratch.write_bytes(data)
            _set_time(scratch, modified or time.time(), etag)

    def _changing(self, folder: str) -> Path:
        """File that is locked on this host while the records of a folder are changed."""
        return self._root / "leases" / f"{folder}.changing"

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _is_copy(path: Path, entry: Entry | None) -> bool:
    if entry is None or not path.exists():
        return False
    return path.stat().st_mtime_ns % _SECOND == _number(entry.etag)


def _set_time(path: Path, modified: float, etag: str) -> None:
    stamp = int(modified) * _SECOND + _number(etag)
    os.utime(path, ns=(stamp, stamp))


def _number(etag: str) -> int:
    return zlib.crc32(etag.encode()) % _SECOND
