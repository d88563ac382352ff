"""Files on their way between a bucket and a local folder, and snapshots of work folders.

Layout of a snapshot, below ``work/<stage>/<key>/<writer>/`` of the store::

    snapshot.json     the folder's files at one moment, and their digests; written last
    <sha256>          their contents

Each host writes its own, and the newest one is taken, so that any host can go on from there.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from stages.contract.atomic import atomic_path, fsync
from stages.contract.digests import files_by_name, sha256_file
from stages.contract.errors import DamagedArtifactError, GebError
from stages.contract.manifest import FileRecord, check_file
from stages.store.base import MARKER
from stages.store.remote.bucket import PARALLEL_TRANSFERS, Bucket

# One request reads this much.
_RANGE_BYTES = 16 << 20
_PARALLEL_RANGES = 4
_SNAPSHOT = "snapshot.json"
_TRIES = 5

Stat = tuple[int, int, int]


def upload_files(bucket: Bucket, files: Iterable[tuple[Path, str]]) -> None:
    """Uploads files under the names given with them."""
    _in_parallel(bucket.upload, files)


def download_files(
    bucket: Bucket,
    files: Iterable[tuple[str, FileRecord, Path]],
) -> None:
    """Downloads objects that are not here; each file appears whole and verified, or not at all.

    ``files`` are objects, what each must be, and where it goes.

    Raises:
        DamagedArtifactError: An object is missing, or not what its record says.
    """

    def download(name: str, record: FileRecord, target: Path) -> None:
        if _is_here(target, record):
            return
        with atomic_path(target) as scratch:
            with scratch.open("wb") as file:
                check_object(bucket, name, record, file.write)
            scratch.chmod(0o644)
            os.utime(scratch, ns=(record.mtime_ns, record.mtime_ns))
            # A file of the right size and time is not hashed again: its content must be on the
            # disk.
            fsync(scratch)

    _in_parallel(download, files)


def check_object(
    bucket: Bucket,
    name: str,
    record: FileRecord,
    keep: Callable[[bytes], object] = lambda data: None,
) -> None:
    """Reads and hashes an object's content, some ranges ahead; ``keep`` receives it in order.

    Raises:
        DamagedArtifactError: It is missing or differs.
    """
    digest = hashlib.sha256()
    try:
        for data in _read(bucket, name, record.size):
            digest.update(data)
            keep(data)
    except FileNotFoundError as error:
        raise DamagedArtifactError(f"damaged artifact: {error} is missing") from error
    if digest.hexdigest() != record.sha256:
        raise DamagedArtifactError(
            f"damaged artifact: the content of {bucket.url}/{name} has changed"
        )


def download_folder(bucket: Bucket, folder: str, target: Path) -> None:
    """Downloads all objects below a folder of the bucket; the caller checks what has come."""

    def download(name: str, size: int) -> None:
        with atomic_path(target / name) as scratch, scratch.open("wb") as file:
            for data in _read(bucket, f"{folder}/{name}", size):
                file.write(data)

    _in_parallel(download, ((name, entry.size) for name, entry in bucket.list(folder).items()))


def _read(bucket: Bucket, name: str, size: int) -> Iterator[bytes]:
    """Content of an object, in order; some ranges are read ahead."""
    starts = range(0, size, _RANGE_BYTES)

    def read(start: int) -> bytes:
        return bucket.read_range(name, start, min(start + _RANGE_BYTES, size))

    with ThreadPoolExecutor(_PARALLEL_RANGES) as pool:
        for first in range(0, len(starts), _PARALLEL_RANGES):
            yield from pool.map(read, starts[first : first + _PARALLEL_RANGES])


@contextmanager
def repeated(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Calls ``act`` in a thread now and then during the block, and once at its end.

    A call that fails disturbs nobody; the next one may do better.
    """
    ended = threading.Event()

    def repeat() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(seconds)
            with contextlib.suppress(GebError, OSError):
                act()

    thread = threading.Thread(target=repeat, name="repeated", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _in_parallel(act: Callable[..., object], calls: Iterable[tuple[object, ...]]) -> None:
    """Makes all calls or raises the first failure; what has not begun by then is left."""
    pool = ThreadPoolExecutor(PARALLEL_TRANSFERS)
    try:
        pending = [pool.submit(act, *arguments) for arguments in calls]
        for future in as_completed(pending):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _is_here(path: Path, record: FileRecord) -> bool:
    """True if a file is on this host as its record has it; another one is removed."""
    try:
        check_file(path, record, always_hash=False)
    except DamagedArtifactError:
        path.unlink(missing_ok=True)
        return False
    return True


class _Snapshot(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    files: dict[str, FileRecord]


class RemoteWork:
    """The work folder of one key, ``name``: below a store's local ``root``, and in its bucket."""

    def __init__(self, bucket: Bucket, root: Path, name: str) -> None:
        self._bucket = bucket
        self._name = name
        self._local = root / name
        self._scratch = root / ".parts"
        self._own = f"{name}/{json.loads((root / MARKER).read_text())['id']}"
        self._digests: dict[Stat, str] = {}

    def pull(self) -> bool:
        """Brings the folder to the newest snapshot; False if there is none but what is here.

        Raises:
            DamagedArtifactError: The snapshot is not what was saved.
        """
        folder = self._newest()
        if folder is None or (folder == self._own and self._local.exists()):
            return False
        with self._scratch_folder() as incoming:
            incoming.mkdir(parents=True)
            files = [
                (f"{folder}/{record.sha256}", record, incoming / name)
                for name, record in self._read(folder).items()
            ]
            download_files(self._bucket, files)
            shutil.rmtree(self._local, ignore_errors=True)
            self._local.parent.mkdir(parents=True, exist_ok=True)
            incoming.rename(self._local)
        return True

    def files(self) -> frozenset[str]:
        """Names of the files of the newest snapshot; none if it cannot be read."""
        with contextlib.suppress(DamagedArtifactError):
            if (folder := self._newest()) is not None:
                return frozenset(self._read(folder))
        return frozenset()

    def push(self) -> bool:
        """Makes a snapshot of the folder as it is now; returns True if there is a new one."""
        with self._scratch_folder() as clone:
            stats = next((found for _ in range(_TRIES) if (found := self._link(clone))), None)
            return self._upload(clone, stats) if stats else False

    def drop(self) -> None:
        """Removes all snapshots from the bucket: the artifact is there."""
        self._bucket.delete(f"{self._name}/{each}" for each in self._bucket.list(self._name))

    @contextmanager
    def _scratch_folder(self) -> Iterator[Path]:
        folder = self._scratch / uuid.uuid4().hex
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _newest(self) -> str | None:
        listed = self._bucket.list(self._name).items()
        found = [(each.modified, name) for name, each in listed if name.endswith(f"/{_SNAPSHOT}")]
        return f"{self._name}/{max(found)[1].partition('/')[0]}" if found else None

    def _read(self, folder: str) -> dict[str, FileRecord]:
        found = self._bucket.read(f"{folder}/{_SNAPSHOT}", _Snapshot)
        return found.files if found else {}

    def _link(self, clone: Path) -> dict[str, Stat] | None:
        """Hard links to the files as they are at one moment; None if they do not hold still."""
        shutil.rmtree(clone, ignore_errors=True)
        try:
            shutil.copytree(self._local, clone, copy_function=os.link)
        except (shutil.Error, FileNotFoundError):
            return None
        stats = _stats(clone)
        return stats if stats == _stats(self._local) else None

    def _upload(self, clone: Path, stats: dict[str, Stat]) -> bool:
        files = {name: self._record(clone / name, stat) for name, stat in stats.items()}
        there = self._bucket.list(self._own)
        contents = {record.sha256: clone / name for name, record in files.items()}
        missing = contents.keys() - there.keys()
        upload_files(self._bucket, [(contents[name], f"{self._own}/{name}") for name in missing])
        if _stats(clone) != stats:
            # Somebody wrote into them while they were uploaded; the next time they may be still.
            self._bucket.delete(f"{self._own}/{name}" for name in missing)
            return False
        snapshot = _Snapshot(files=files).model_dump_json().encode()
        self._bucket.put(f"{self._own}/{_SNAPSHOT}", snapshot)
        gone = there.keys() - contents.keys() - {_SNAPSHOT}
        self._bucket.delete(f"{self._own}/{name}" for name in gone)
        return True

    def _record(self, path: Path, stat: Stat) -> FileRecord:
        if stat not in self._digests:
            self._digests[stat] = sha256_file(path)
        _, size, mtime = stat
        return FileRecord(size=size, sha256=self._digests[stat], mtime_ns=mtime)


def _stats(folder: Path) -> dict[str, Stat]:
    """Inode, size and time of each file below a folder."""
    return {
        name: (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        for name, path in files_by_name(folder).items()
        if (stat := path.stat())
    }
