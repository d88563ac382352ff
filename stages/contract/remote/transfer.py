"""Files of artifacts on their way between a bucket and a local folder, each checked on arrival."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from stages.contract.atomic import fsync
from stages.contract.errors import DamagedArtifactError
from stages.contract.manifest import FileRecord, check_file
from stages.contract.remote.bucket import PARALLEL_TRANSFERS, Bucket
from stages.contract.store import OnBytes

# One request reads this much; a download that was interrupted loses as much of each file at most
# times the requests that are under way.
_RANGE_BYTES = 16 << 20
_PARALLEL_RANGES = 4
_READ_BYTES = 1 << 20

# Time between two reports of a transfer's progress.
_REPORT_SECONDS = 1.0


class Meter:
    """Adds up what several threads transfer."""

    def __init__(self) -> None:
        self.done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Counts bytes."""
        with self._lock:
            self.done += count


def upload_files(
    bucket: Bucket, files: Iterable[tuple[Path, str]], on_bytes: OnBytes | None = None
) -> None:
    """Uploads files under the names given with them."""
    sizes = [(path, name, path.stat().st_size) for path, name in files]
    meter = Meter()

    def upload(path: Path, name: str, size: int) -> None:
        bucket.upload(path, name)
        meter.add(size)

    acts = [functools.partial(upload, *each) for each in sizes]
    _in_parallel(acts, meter, sum(size for *_, size in sizes), on_bytes)


def download_files(
    bucket: Bucket,
    files: Iterable[tuple[str, FileRecord, Path]],
    parts: Path,
    on_bytes: OnBytes | None = None,
) -> None:
    """Downloads objects; each file appears whole and verified, or not at all.

    Args:
        bucket: Where from.
        files: Object, what it must be, and where it goes.
        parts: Folder for what has come of a file so far; a later call goes on from there.
        on_bytes: Is told what has come.

    Raises:
        DamagedArtifactError: An object is missing, or not what its record says.
    """
    wanted = list(files)
    parts.mkdir(parents=True, exist_ok=True)
    meter = Meter()

    def download(name: str, record: FileRecord, target: Path) -> None:
        part = parts / hashlib.sha256(name.encode()).hexdigest()
        _download(bucket, name, record, target, part, meter)

    acts = [functools.partial(download, *each) for each in wanted]
    _in_parallel(acts, meter, sum(record.size for _, record, _ in wanted), on_bytes)


def _in_parallel(
    acts: Sequence[Callable[[], None]], meter: Meter, total: int, on_bytes: OnBytes | None
) -> None:
    """Does all of it or raises the first failure; what has not begun by then is left."""
    pool = ThreadPoolExecutor(PARALLEL_TRANSFERS)
    try:
        pending = {pool.submit(act) for act in acts}
        while pending:
            done, pending = wait(pending, timeout=_REPORT_SECONDS, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
            if on_bytes is not None:
                on_bytes(meter.done, total)
    finally:
        pool.shutdown(cancel_futures=True)


def is_here(path: Path, record: FileRecord) -> bool:
    """True where a file is on this host as its record has it; another one is removed."""
    try:
        check_file(path, record, always_hash=False)
    except DamagedArtifactError:
        path.unlink(missing_ok=True)
        return False
    return True


def hash_object(bucket: Bucket, name: str, size: int) -> str:
    """Digest of an object's content, which is read and not kept."""
    digest = hashlib.sha256()
    for data in _ranges(bucket, name, 0, size):
        digest.update(data)
    return digest.hexdigest()


def _download(
    bucket: Bucket, name: str, record: FileRecord, target: Path, part: Path, meter: Meter
) -> None:
    resumed = part.exists()
    digest = _complete(bucket, name, record, part, meter)
    if digest != record.sha256 and resumed:
        # The part left of an interrupted download may be at fault as well.
        part.unlink()
        digest = _complete(bucket, name, record, part, meter)
    if digest != record.sha256:
        part.unlink()
        raise DamagedArtifactError(
            f"damaged artifact: the content of {bucket.url}/{name} has changed"
        )
    part.chmod(0o644)
    os.utime(part, ns=(record.mtime_ns, record.mtime_ns))
    # A file of the right size and time is not hashed again: its content must be on the disk.
    fsync(part)
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)


def _complete(bucket: Bucket, name: str, record: FileRecord, part: Path, meter: Meter) -> str:
    """Appends to ``part`` what it lacks and returns the digest of the whole."""
    digest = hashlib.sha256()
    with part.open("a+b") as file:
        file.seek(0)
        while data := file.read(_READ_BYTES):
            digest.update(data)
            meter.add(len(data))
        try:
            for data in _ranges(bucket, name, file.tell(), record.size):
                file.write(data)
                digest.update(data)
                meter.add(len(data))
        except FileNotFoundError as error:
            raise DamagedArtifactError(f"damaged artifact: {error} is missing") from error
    return digest.hexdigest()


def _ranges(bucket: Bucket, name: str, start: int, stop: int) -> Iterable[bytes]:
    """The content of an object from ``start`` on, in order, some ranges read ahead."""
    starts = range(start, stop, _RANGE_BYTES)

    def read(first: int) -> bytes:
        return bucket.read_range(name, first, min(first + _RANGE_BYTES, stop))

    if len(starts) == 1:
        yield read(start)
        return
    with ThreadPoolExecutor(_PARALLEL_RANGES) as pool:
        for first in range(0, len(starts), _PARALLEL_RANGES):
            yield from pool.map(read, starts[first : first + _PARALLEL_RANGES])
