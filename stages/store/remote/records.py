"""Records (runs, models, logs) in a bucket and in the store's local folder.

A local file that is a copy of an object has its time: the second of the object's last write, and
in place of the nanoseconds a number from its ETag that ends in 777. Other files were written here.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stages.contract.atomic import atomic_path
from stages.contract.errors import ConflictError
from stages.store.locks import exclusive_lock, try_lock
from stages.store.remote.bucket import PARALLEL_TRANSFERS, Bucket, Entry

_SECOND = 10**9
_MARK = 777
_RECORDS = ".json"
_CHANGED = ("models",)  # Folders whose records are written in blocks of `changed` alone.


class Records:
    """Copies records between a store's local folder and its bucket."""

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self._bucket = bucket
        self._root = root

    def refresh(self, folder: str) -> None:
        """Brings the local records of a folder to what the bucket has, but for newer ones."""
        lock = try_lock(self._changing(folder), shared=True)
        # Records that this host is changing stay as they are until then.
        if lock is not None:
            try:
                there = self._bucket.list(folder)
                if folder in _CHANGED:
                    self._drop_unless(_is_marked, folder, there)
                self._pull(folder, there)
            finally:
                os.close(lock)

    def push(self, path: Path) -> None:
        """Uploads a file, or those files of a folder that the bucket does not have."""
        if path.is_file():
            self._put(path)
            return
        there = self._bucket.list(self._name(path))
        changed = [
            each
            for each in path.rglob("*")
            if each.is_file() and not _is_copy(each, there.get(str(each.relative_to(path))))
        ]
        with ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool:
            list(pool.map(self._put, changed))

    @contextmanager
    def changed(self, folder: str) -> Iterator[None]:
        """Uploads the records that the block changes, if the bucket still has those before.

        Raises:
            ConflictError: Another host changed a record meanwhile.
        """
        with exclusive_lock(self._changing(folder)):
            there = self._bucket.list(folder)
            self._drop_unless(_is_copy, folder, there)
            self._pull(folder, there)
            try:
                yield
                # The versions of a model come before the aliases that name them.
                for path, entry in sorted(self._local(folder, there), reverse=True):
                    if not _is_copy(path, entry):
                        self._replace(path, entry)
            except BaseException:
                self._drop_unless(_is_copy, folder, there)
                raise

    def _drop_unless(
        self, keeps: Callable[[Path, Entry | None], bool], folder: str, there: dict[str, Entry]
    ) -> None:
        """Removes what a change left here that did not get into the bucket; others may, too."""
        for path, entry in self._local(folder, there):
            with suppress(FileNotFoundError):
                if not keeps(path, entry):
                    path.unlink()

    def _pull(self, folder: str, there: dict[str, Entry]) -> None:
        stale = [
            f"{folder}/{name}"
            for name, entry in there.items()
            if name.endswith(_RECORDS) and _is_stale(self._root / folder / name, entry)
        ]
        for name, found in self._bucket.get_all(stale).items():
            with atomic_path(self._root / name) as scratch:
                scratch.write_bytes(found.data)
                os.utime(scratch, ns=(_stamp(found),) * 2)

    def _replace(self, path: Path, entry: Entry | None) -> None:
        """Uploads a record if the bucket has what was listed, or still nothing."""
        name = self._name(path)
        found = self._bucket.get(name) if entry else None
        if entry and (found is None or found.etag != entry.etag):
            raise ConflictError(f"{self._bucket.url}/{name} has been changed meanwhile; try again")
        self._put(path, absent=entry is None, replaces=found)

    def _put(self, path: Path, **condition: Any) -> None:
        name = self._name(path)
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            etag = self._bucket.put(name, file.read(), **condition)
            there = self._bucket.head(name)
            # What another host wrote after it is older than any other file: it is fetched.
            stamp = _stamp(there) if there.etag == etag else 0
            # A file that changed while it travelled is uploaded by the next push.
            if os.fstat(file.fileno()).st_mtime_ns == before.st_mtime_ns:
                os.utime(file.fileno(), ns=(stamp, stamp))

    def _changing(self, folder: str) -> Path:
        """File that is locked on this host while the records of a folder are changed."""
        return self._root / "leases" / f"{folder}.changing"

    def _local(self, folder: str, there: dict[str, Entry]) -> list[tuple[Path, Entry | None]]:
        """Local records of a folder, with what the bucket has of them."""
        start = self._root / folder
        return [
            (path, there.get(path.relative_to(start).as_posix()))
            for path in start.rglob(f"*{_RECORDS}")
            if not path.name.startswith(".")
        ]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _is_stale(path: Path, entry: Entry) -> bool:
    if not path.exists():
        return True
    if _is_marked(path, entry):
        return not _is_copy(path, entry)
    return path.stat().st_mtime_ns // _SECOND < int(entry.modified)


def _is_marked(path: Path, entry: Entry | None) -> bool:
    return path.stat().st_mtime_ns % 1000 == _MARK


def _is_copy(path: Path, entry: Entry | None) -> bool:
    return entry is not None and path.stat().st_mtime_ns == _stamp(entry)


def _stamp(entry: Entry) -> int:
    number = zlib.crc32(entry.etag.encode()) % 10**6
    return int(entry.modified) * _SECOND + number * 1000 + _MARK
