"""Records (runs, models, logs) in a bucket and in the store's local folder.

A local file that is a copy of an object has its time: the second of the object's last write, and
in place of the nanoseconds a number from its ETag that ends in 777. Other files were written here.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.contract.atomic import atomic_path
from stages.contract.errors import ConflictError
from stages.store.locks import exclusive_lock, try_lock
from stages.store.remote.bucket import Bucket, Entry
from stages.store.remote.transfer import in_parallel

_SECOND = 10**9
_MARK = 777
_RECORDS = ".json"
Entries = dict[str, Entry]


class Records:
    """Copies records between a store's local folder and its bucket."""

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self._bucket = bucket
        self._root = root

    def refresh(self, folder: str) -> None:
        """Updates the local records of a folder from the bucket, except those newer here."""
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

    def push(self, path: Path) -> None:
        """Uploads a file, or those files of a folder that the bucket does not have."""
        there: Entries = {}
        files = [path]
        if path.is_dir():
            there = self._bucket.list(self._name(path))
            files = [file for file in path.rglob("*") if file.is_file()]
        changed = [
            file for file in files if not _is_copy(file, there.get(str(file.relative_to(path))))
        ]
        in_parallel(self._put, [(file,) for file in changed])

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
                # The versions of a model come before the aliases that name them.
                for path, entry in sorted(self._changes(folder, there), reverse=True):
                    self._replace(path, entry)
            except BaseException:
                self._drop_changes(folder, there)
                raise

    def _changes(self, folder: str, there: Entries) -> list[tuple[Path, Entry | None]]:
        """Local records of a folder that differ from the bucket's, with the bucket's entries."""
        start = self._root / folder
        records = [
            (path, there.get(path.relative_to(start).as_posix()))
            for path in start.rglob(f"*{_RECORDS}")
            if not path.name.startswith(".")
        ]
        return [(path, entry) for path, entry in records if not _is_copy(path, entry)]

    def _drop_changes(self, folder: str, there: Entries) -> None:
        for path, _ in self._changes(folder, there):
            path.unlink(missing_ok=True)

    def _pull(self, folder: str, there: Entries) -> None:
        stale = [
            (f"{folder}/{name}",)
            for name, entry in there.items()
            if name.endswith(_RECORDS) and _is_stale(self._root / folder / name, entry)
        ]
        in_parallel(self._fetch, stale)

    def _fetch(self, name: str) -> None:
        entry = self._bucket.get(name)
        # It may have gone since it was listed.
        if entry is not None:
            with atomic_path(self._root / name) as scratch:
                scratch.write_bytes(entry.data)
                os.utime(scratch, ns=(_stamp(entry),) * 2)

    def _replace(self, path: Path, entry: Entry | None) -> None:
        """Uploads a record if the bucket has what was listed, or still nothing."""
        name = self._name(path)
        present = self._bucket.get(name) if entry else None
        if entry and (present is None or present.etag != entry.etag):
            raise ConflictError(f"{self._bucket.url}/{name} has been changed meanwhile; try again")
        self._put(path, absent=entry is None, replaces=present)

    def _put(self, path: Path, **condition: Any) -> None:
        name = self._name(path)
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            etag = self._bucket.put(name, file.read(), **condition)
            there = self._bucket.head(name)
            # A record that another host wrote after it is newer, and is fetched.
            stamp = _stamp(there) if there.etag == etag else 0
            # A file that changed while it travelled is uploaded by the next push.
            if os.fstat(file.fileno()).st_mtime_ns == before.st_mtime_ns:
                os.utime(file.fileno(), ns=(stamp, stamp))

    def _changing(self, folder: str) -> Path:
        """File that is locked on this host while the records of a folder are changed."""
        return self._root / "leases" / f"{folder}.changing"

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _is_stale(path: Path, entry: Entry) -> bool:
    if not path.exists():
        return True
    if path.stat().st_mtime_ns % 1000 == _MARK:
        return not _is_copy(path, entry)
    return path.stat().st_mtime_ns // _SECOND < int(entry.modified)


def _is_copy(path: Path, entry: Entry | None) -> bool:
    return entry is not None and path.exists() and path.stat().st_mtime_ns == _stamp(entry)


def _stamp(entry: Entry) -> int:
    number = zlib.crc32(entry.etag.encode()) % 10**6
    return int(entry.modified) * _SECOND + number * 1000 + _MARK
