"""Files on their way between a bucket and a local folder, and snapshots of work folders.

Layout of a snapshot, below ``work/<stage>/<key>/`` of the store::

    snapshot.json     the folder's files at one moment, and their digests; written last
    <sha256>          their contents
"""

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.contract.atomic import atomic_path, fsync
from stages.contract.digests import files_by_name, in_threads, sha256_file
from stages.contract.errors import DamagedArtifactError, GebError
from stages.contract.manifest import FileRecord, check_file
from stages.contract.records import Record
from stages.store.remote.bucket import Bucket

_SNAPSHOT = "snapshot.json"


def upload_missing(bucket: Bucket, folder: str, files: Mapping[str, Path]) -> set[str]:
    """Uploads files to a folder of the bucket, unless it has them in their sizes.

    Returns:
        The names that the folder had before.
    """
    there = bucket.list(folder)
    missing = [
        (path, f"{folder}/{name}")
        for name, path in files.items()
        if name not in there or there[name].size != path.stat().st_size
    ]
    in_threads(lambda pair: bucket.upload(*pair), missing)
    return set(there)


def download_files(bucket: Bucket, files: Collection[tuple[str, FileRecord, Path]]) -> None:
    """Downloads objects that are not here; each file appears whole and verified, or not at all.

    ``files`` are objects, their records, and their places here.

    Raises:
        DamagedArtifactError: An object is missing, or differs from its record.
    """

    def download(file: tuple[str, FileRecord, Path]) -> None:
        name, record, target = file
        if _is_here(target, record):
            return
        with atomic_path(target) as scratch:
            with scratch.open("wb") as content:
                check_object(bucket, name, record, content.write)
            scratch.chmod(0o644)
            os.utime(scratch, ns=(record.mtime_ns, record.mtime_ns))
            # A file of the right size and time is not hashed again: its content must be on the
            # disk.
            fsync(scratch)

    in_threads(download, files)


def check_object(
    bucket: Bucket,
    name: str,
    record: FileRecord,
    keep: Callable[[bytes], object] = lambda data: None,
) -> None:
    """Reads and hashes an object's content; ``keep`` receives it in order.

    Raises:
        DamagedArtifactError: It is missing or differs.
    """
    digest = hashlib.sha256()
    try:
        for data in bucket.stream(name, record.size):
            digest.update(data)
            keep(data)
    except FileNotFoundError as error:
        raise DamagedArtifactError(f"damaged artifact: {error} is missing") from error
    if digest.hexdigest() != record.sha256:
        raise DamagedArtifactError(
            f"damaged artifact: the content of {bucket.url}/{name} has changed"
        )


def download_folder(bucket: Bucket, folder: str, target: Path) -> None:
    """Downloads all objects below a folder of the bucket; the caller checks them."""
    entries = bucket.list(folder)
    sizes = {name: entry.size for name, entry in entries.items()}

    def download(name: str) -> None:
        with atomic_path(target / name) as scratch, scratch.open("wb") as file:
            file.writelines(bucket.stream(f"{folder}/{name}", sizes[name]))

    in_threads(download, sizes)


@contextmanager
def repeated(seconds: float, act: Callable[[], object]) -> Iterator[None]:
    """Calls ``act`` in a thread now and then during the block, and once at its end.

    A call that fails is ignored; the next one may do better.
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


def _is_here(path: Path, record: FileRecord) -> bool:
    """True if a file is on this host as its record has it; another one is removed."""
    try:
        check_file(path, record, always_hash=False)
    except DamagedArtifactError:
        path.unlink(missing_ok=True)
        return False
    return True


def _link(source: str, target: str) -> None:
    """Links a file, or copies it on file systems without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class _Snapshot(Record):
    writer: str
    """Local folder of the store that it was made of."""
    files: dict[str, FileRecord]


class RemoteWork:
    """The work folder of one key, ``name``: below a store's local ``root``, and in its bucket.

    ``writer`` is the id of the store's local folder.
    """

    def __init__(self, bucket: Bucket, root: Path, name: str, writer: str) -> None:
        self._bucket = bucket
        self._name = name
        self._local = root / name
        self._scratch = root / ".parts"
        self._writer = writer
        self._digests: dict[tuple[int, int, int], str] = {}

    def pull(self) -> bool:
        """Brings the folder to the snapshot; False if there is none but of this folder.

        Raises:
            DamagedArtifactError: A file of the snapshot is missing or damaged.
        """
        snapshot = self._read()
        if snapshot is None or (snapshot.writer == self._writer and self._local.exists()):
            return False
        with self._scratch_folder() as scratch:
            incoming = scratch / "incoming"
            incoming.mkdir()
            files = [
                (f"{self._name}/{record.sha256}", record, incoming / name)
                for name, record in snapshot.files.items()
            ]
            download_files(self._bucket, files)
            shutil.rmtree(self._local, ignore_errors=True)
            self._local.parent.mkdir(parents=True, exist_ok=True)
            incoming.rename(self._local)
        return True

    def files(self) -> frozenset[str]:
        """Names and digests of the files of the snapshot; none if it cannot be read."""
        with contextlib.suppress(DamagedArtifactError):
            if snapshot := self._read():
                files = snapshot.files.items()
                return frozenset(f"{name} {record.sha256}" for name, record in files)
        return frozenset()

    def push(self) -> None:
        """Makes a snapshot of the folder; a stage shows a file or folder once it is whole."""
        with self._scratch_folder() as scratch:
            # Links keep the files of one moment.
            clone = scratch / "clone"
            shutil.copytree(
                self._local, clone, copy_function=_link, ignore=shutil.ignore_patterns(".*")
            )
            records = {}
            contents = {}
            for name, path in files_by_name(clone).items():
                record = self._record(path)
                records[name] = record
                contents[record.sha256] = path
            there = upload_missing(self._bucket, self._name, contents)
            snapshot = _Snapshot(writer=self._writer, files=records)
            self._bucket.put(f"{self._name}/{_SNAPSHOT}", snapshot.model_dump_json().encode())
            gone = there - contents.keys() - {_SNAPSHOT}
            self._bucket.delete(f"{self._name}/{digest}" for digest in gone)

    def drop(self) -> None:
        """Removes the snapshot from the bucket: the artifact is there."""
        names = self._bucket.list(self._name)
        self._bucket.delete(f"{self._name}/{name}" for name in names)

    @contextmanager
    def _scratch_folder(self) -> Iterator[Path]:
        self._scratch.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def _read(self) -> _Snapshot | None:
        return self._bucket.read(f"{self._name}/{_SNAPSHOT}", _Snapshot)

    def _record(self, path: Path) -> FileRecord:
        status = path.stat()
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if state not in self._digests:
            self._digests[state] = sha256_file(path)
        return FileRecord(
            size=status.st_size, sha256=self._digests[state], mtime_ns=status.st_mtime_ns
        )
