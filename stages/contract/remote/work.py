"""Resumable work folders in the bucket: any host can continue a failed attempt.

Layout below ``work/<stage>/<key>/`` of the store::

    snapshot.json     which files the folder had at one moment, and their digests
    <sha256>          their contents

A snapshot appears by one write after all its contents, so that a host that dies while it uploads
leaves the one before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.contract.digests import sha256_file
from stages.contract.errors import DamagedArtifactError, GebError
from stages.contract.manifest import FileRecord
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.transfer import download_files, upload_files
from stages.contract.store import OnBytes

_SNAPSHOT = "snapshot.json"
_TRIES = 5


class _Snapshot(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    writer: str
    """Identity of the local folder that it was made from."""
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class _Link:
    name: str
    path: Path
    record: FileRecord

    def is_unchanged(self) -> bool:
        """True while the file is what was hashed."""
        stat = self.path.stat()
        return (stat.st_size, stat.st_mtime_ns) == (self.record.size, self.record.mtime_ns)


class RemoteWork:
    """The work folder of one key, here and in the bucket.

    Args:
        bucket: The store's bucket.
        name: The folder's name in it.
        local: The folder on this host.
        artifact: Folder of the finished artifact on this host; once it is there, the work folder
            is being removed.
        scratch: Folder of this store for what is under way, on the same file system.
        writer: Identity of this host's local folder.
    """

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        local: Path,
        artifact: Path,
        *,
        scratch: Path,
        writer: str,
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._local = local
        self._artifact = artifact
        self._scratch = scratch
        self._writer = writer
        self._digests: dict[tuple[int, int, int], str] = {}

    def pull(self, on_bytes: OnBytes | None = None) -> bool:
        """Brings the folder to the last snapshot, unless what is here is where that came from.

        Returns:
            Whether it was brought from elsewhere.

        Raises:
            DamagedArtifactError: The snapshot is not what was saved.
        """
        snapshot = self._snapshot()
        if snapshot is None:
            return False
        if snapshot.writer == self._writer and self._local.exists():
            return False
        incoming = self._scratch / f"incoming-{uuid.uuid4().hex[:8]}"
        incoming.mkdir(parents=True)
        try:
            self._download(snapshot, incoming, on_bytes)
            shutil.rmtree(self._local, ignore_errors=True)
            self._local.parent.mkdir(parents=True, exist_ok=True)
            incoming.rename(self._local)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        return True

    def files(self) -> frozenset[str]:
        """Names of the files of the last snapshot; none where it cannot be read."""
        with contextlib.suppress(DamagedArtifactError):
            if (snapshot := self._snapshot()) is not None:
                return frozenset(snapshot.files)
        return frozenset()

    def _snapshot(self) -> _Snapshot | None:
        found = self._bucket.get(f"{self._name}/{_SNAPSHOT}")
        if found is None:
            return None
        try:
            return _Snapshot.model_validate_json(found.data)
        except ValidationError as error:
            raise DamagedArtifactError(
                f"{self._bucket.url}/{self._name}/{_SNAPSHOT} is unreadable"
            ) from error

    def _download(self, snapshot: _Snapshot, target: Path, on_bytes: OnBytes | None) -> None:
        # Equal files are one object.
        first = {record.sha256: name for name, record in reversed(snapshot.files.items())}
        files = [
            (f"{self._name}/{digest}", snapshot.files[name], target / name)
            for digest, name in first.items()
        ]
        download_files(self._bucket, files, self._scratch / "parts", on_bytes)
        for name, record in snapshot.files.items():
            if not (target / name).exists():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(target / first[record.sha256], target / name)

    def push(self) -> bool:
        """Makes a snapshot of the folder as it is now; returns whether there is a new one."""
        if not self._local.exists():
            return False
        with self._links() as links:
            if not links:
                return False
            files = {link.name: link.record for link in links}
            there = self._bucket.list(self._name)
            missing = {
                link.record.sha256: link.path for link in links if link.record.sha256 not in there
            }
            upload_files(
                self._bucket, [(path, f"{self._name}/{name}") for name, path in missing.items()]
            )
            changed = [link.record.sha256 for link in links if not link.is_unchanged()]
            if changed:
                # Written to while they were uploaded; the next time they may be still.
                self._bucket.delete(f"{self._name}/{name}" for name in changed if name in missing)
                return False
        snapshot = _Snapshot(writer=self._writer, files=files)
        self._bucket.put(f"{self._name}/{_SNAPSHOT}", snapshot.model_dump_json().encode())
        kept = {record.sha256 for record in files.values()} | {_SNAPSHOT}
        self._bucket.delete(f"{self._name}/{name}" for name in set(there) - kept)
        return True

    def drop(self) -> None:
        """Removes it from the bucket: the artifact is there."""
        names = self._bucket.list(self._name)
        # First what makes the others count.
        for each in sorted(names, key=lambda name: name != _SNAPSHOT):
            self._bucket.delete([f"{self._name}/{each}"])

    @contextmanager
    def pushed_every(self, seconds: float, check_lease: Callable[[], None]) -> Iterator[None]:
        """Snapshots by a thread during the block, and one at its end if the folder is still there.

        Nothing that goes wrong with them disturbs the attempt: its artifact may do without.

        Args:
            seconds: Between two snapshots.
            check_lease: Raises where another host computes the key by now.
        """
        ended = threading.Event()

        def push() -> None:
            with contextlib.suppress(GebError, OSError):
                check_lease()
                self.push()

        def go_on() -> None:
            while not ended.wait(seconds):
                push()

        thread = threading.Thread(target=go_on, name="work", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            push()

    @contextmanager
    def _links(self) -> Iterator[list[_Link] | None]:
        """The files as they are at one moment, by hard links; None when they do not hold still."""
        clone = self._scratch / f"clone-{uuid.uuid4().hex[:8]}"
        try:
            yield next((links for _ in range(_TRIES) if (links := self._link(clone))), None)
        finally:
            shutil.rmtree(clone, ignore_errors=True)

    def _link(self, clone: Path) -> list[_Link] | None:
        shutil.rmtree(clone, ignore_errors=True)
        before = self._inodes()
        try:
            for name in before:
                (clone / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(self._local / name, clone / name)
        except FileNotFoundError:
            return None
        if self._inodes() != before or self._artifact.exists():
            return None
        return [_Link(name, clone / name, self._record(clone / name)) for name in before]

    def _inodes(self) -> dict[str, int]:
        try:
            return {
                path.relative_to(self._local).as_posix(): path.stat().st_ino
                for path in sorted(self._local.rglob("*"))
                if path.is_file()
            }
        except FileNotFoundError:
            return {}

    def _record(self, path: Path) -> FileRecord:
        stat = path.stat()
        known = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if known not in self._digests:
            self._digests[known] = sha256_file(path)
        return FileRecord(size=stat.st_size, sha256=self._digests[known], mtime_ns=stat.st_mtime_ns)
