"""A store in a bucket: a local store on each host, and its mirror in the bucket.

Layout of the bucket below the store's prefix::

    store.json                             marks the prefix as a store
    artifacts/<stage>/<key>/manifest.json  an artifact; written last, if there is none
    artifacts/<stage>/<key>/<upload>/      its files; two hosts that made it upload apart
    work/<stage>/<key>/                    resumable state of attempts, see `transfer.py`
    logs/ runs/ models/                    as in a local store, see `records.py`
    quarantine/<name>/                     artifacts set aside: damaged, or computed again

Stages work in the local folder, which may be removed whenever no stage runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from stages.contract.atomic import explain_disk_errors, write_atomically
from stages.contract.errors import (
    ConflictError,
    DamagedArtifactError,
    StoreError,
    UserError,
)
from stages.contract.manifest import MANIFEST, Manifest, read_manifest
from stages.store.base import FORMAT, MARKER, Artifact, Store, quarantine_place
from stages.store.locks import FileLease, exclusive_lock
from stages.store.remote.bucket import Bucket
from stages.store.remote.records import Records
from stages.store.remote.transfer import (
    RemoteWork,
    check_object,
    download_files,
    upload_missing,
)
from stages.store.usage import StoreEntry

_MARKER_DATA = b'{"format": 3}'


@dataclass(frozen=True)
class RemoteArtifact(Artifact):
    """An artifact of a store in a bucket, of which the files come when they are read."""

    store: RemoteStore

    def address(self, path: str = "") -> str:
        """See :class:`Artifact`."""
        name = _files_folder(self.manifest)
        return "/".join(part for part in (self.store.location, name, path) if part)

    def file(self, path: str = "") -> Path:
        """See :class:`Artifact`; downloads and checks only the files that are not here yet.

        Raises:
            DamagedArtifactError: The bucket does not have it as the manifest names it; it is set
                aside, so that the next run makes it again.
        """
        store = self.store
        manifest = self.manifest
        folder = _files_folder(manifest)
        downloads = []
        for name, record in manifest.files_at(path).items():
            downloads.append((f"{folder}/{name}", record, self.path / name))
        # One process of this host at a time changes the local files of an artifact.
        guard = store.root / "leases" / manifest.stage / f"{manifest.key}.files.guard"
        try:
            with explain_disk_errors(store.root), exclusive_lock(guard):
                self._make_room()
                download_files(store.bucket, downloads)
        except DamagedArtifactError as error:
            aside = store.set_aside(manifest.stage, manifest.key)
            raise DamagedArtifactError(
                f"{error}. Set aside in {aside}; run again to make it anew"
            ) from error
        return self.path / path

    def _make_room(self) -> None:
        """Empties the local folder if another artifact of the key has files there."""
        with contextlib.suppress(DamagedArtifactError):
            if read_manifest(self.path) == self.manifest:
                return
        shutil.rmtree(self.path, ignore_errors=True)
        write_atomically(self.path / MANIFEST, self.manifest.model_dump_json(indent=2))


class RemoteStore(Store):
    """A store in a bucket, and the store in the local folder that stages on this host see."""

    # Other hosts hold their leases elsewhere: younger uploads and work may be theirs.
    left_seconds = 86_400.0

    def __init__(self, bucket: Bucket, root: Path) -> None:
        super().__init__(root, mirror_of=bucket.url)
        self.location = bucket.url
        self.bucket = bucket
        self.local = Store(root, mirror_of=bucket.url)
        self._records = Records(bucket, root)

    @classmethod
    def connect(cls, url: str, home: Path, *, create: bool = False) -> RemoteStore:
        """Opens the store at ``url``; ``home`` is where this host keeps the local folders of such.

        See :func:`stages.store.opening.open_store` for ``create`` and errors.
        """
        bucket = Bucket(url)
        _check_marker(bucket, create=create)
        return cls(bucket, _local_folder(bucket, home))

    def lease(self, stage: str, key: str) -> FileLease:
        """See :class:`Store`: the orchestrator's on this host, for the stage and its transfers.

        Another host that computes the key at the same time makes the same artifact.
        """
        return FileLease(self.orchestrator_path(stage, key))

    def work(self, stage: str, key: str) -> RemoteWork:
        """Resumable state of attempts at a key, here and in the bucket."""
        return RemoteWork(self.bucket, self.root, f"work/{stage}/{key}", self.folder_id)

    def work_files(self, stage: str, key: str) -> frozenset[str]:
        """See :class:`Store`: names and digests in the snapshot."""
        return self.work(stage, key).files()

    def drop_work(self, stage: str, key: str) -> None:
        """See :class:`Store`; the snapshot goes as well."""
        super().drop_work(stage, key)
        if not self.work_path(stage, key).exists():
            self.work(stage, key).drop()

    def load(self, stage: str, key: str, path: str = "") -> Artifact | None:
        """Finds an artifact in the bucket and compares sizes; nothing is brought here."""
        manifest = self.manifest(stage, key)
        if manifest is None:
            return None
        folder = _files_folder(manifest)
        listed = self.bucket.list(folder)
        for name, record in manifest.files_at(path).items():
            size = listed[name].size if name in listed else 0
            if size != record.size:
                raise DamagedArtifactError(
                    f"damaged artifact: {self.location}/{folder}/{name} has {size} bytes, not "
                    f"{record.size}"
                )
        return RemoteArtifact(self.artifact_path(stage, key), manifest, self)

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """See :class:`Store`."""
        return self.bucket.read(f"{_folder(stage, key)}/{MANIFEST}", Manifest)

    def verify(self, artifact: Artifact) -> None:
        """See :class:`Store`; what it reads is not kept."""
        folder = _files_folder(artifact.manifest)
        for name, record in artifact.manifest.files.items():
            check_object(self.bucket, f"{folder}/{name}", record)

    def unpushed(self, stage: str, key: str) -> Artifact | None:
        """An artifact that is whole in the local folder; a damaged one there is removed."""
        try:
            artifact = self.local.load(stage, key)
            if artifact is not None:
                self.local.verify(artifact)
            return artifact
        except DamagedArtifactError:
            self.drop_local(stage, key)
            return None

    def push(self, artifact: Artifact) -> None:
        """Uploads a finished artifact of the local folder: files first, the manifest last.

        An artifact that the bucket already has under the key stays. Files of an earlier call are
        not uploaded again.
        """
        manifest = artifact.manifest
        folder = _files_folder(manifest)
        files = {name: artifact.path / name for name in manifest.files}
        upload_missing(self.bucket, folder, files)
        name = f"{_folder(manifest.stage, manifest.key)}/{MANIFEST}"
        with contextlib.suppress(ConflictError):
            self.bucket.put(name, manifest.model_dump_json(indent=2).encode(), absent=True)

    def set_aside(self, stage: str, key: str) -> str:
        """See :class:`Store`; its local files are removed."""
        self.drop_local(stage, key)
        aside = quarantine_place(stage, key)
        folder = _folder(stage, key)
        for name in sorted(self.bucket.list(folder), key=lambda name: name != MANIFEST):
            self.bucket.rename(f"{folder}/{name}", f"{aside}/{name}")
        return f"{self.location}/{aside}"

    def drop_local(self, stage: str, key: str) -> None:
        """Removes what the local folder has of an artifact."""
        shutil.rmtree(self.artifact_path(stage, key), ignore_errors=True)

    def artifacts(self) -> Iterator[tuple[str, str]]:
        """See :class:`Store`."""
        for name in self.bucket.list("artifacts"):
            stage, key, file = name.split("/", 2)
            if file == MANIFEST:
                yield stage, key

    def contents(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """See :class:`Store`."""
        for name, entry in self.bucket.list(folder).items():
            yield f"{folder}/{name}", entry.size, entry.modified

    def remove(self, gone: StoreEntry) -> None:
        """See :class:`Store`; what is here of it goes as well."""
        # First the manifest, which makes the others count.
        self.bucket.delete([f"{gone.place}/{MANIFEST}"])
        names = self.bucket.list(gone.place)
        self.bucket.delete(f"{gone.place}/{name}" for name in names)
        if gone.kind in ("artifact", "work"):
            shutil.rmtree(self.root / gone.place, ignore_errors=True)

    def refresh(self, folder: str) -> None:
        """See :class:`Store`."""
        self._records.refresh(folder)

    def write(self, path: Path, text: str) -> str:
        """See :class:`Store`."""
        self._records.write(path, text.encode())
        return f"{self.location}/{self._name(path)}"

    def share(self, path: Path) -> str:
        """See :class:`Store`."""
        self.bucket.upload(path, self._name(path))
        return f"{self.location}/{self._name(path)}"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def exclusive(self, folder: str) -> AbstractContextManager[None]:
        """See :class:`Store` and :meth:`Records.changed`."""
        return self._records.changed(folder)


def _folder(stage: str, key: str) -> str:
    return f"artifacts/{stage}/{key}"


def _files_folder(manifest: Manifest) -> str:
    """Folder of an artifact's files: each computation has its own, by the manifest's digest."""
    upload = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:16]
    return f"{_folder(manifest.stage, manifest.key)}/{upload}"


def _check_marker(bucket: Bucket, *, create: bool) -> None:
    """Makes sure that the prefix is a store."""
    marker = bucket.get(MARKER)
    if marker is None and create:
        if bucket.list():
            raise UserError(
                f"{bucket.url} is not empty and holds no {MARKER}: it is not a store",
                "set `store` to a store or to an empty or new prefix",
            )
        with contextlib.suppress(ConflictError):
            bucket.put(MARKER, _MARKER_DATA, absent=True)
        marker = bucket.get(MARKER)
    if marker is None:
        raise StoreError(
            f"no store at {bucket.url} ({bucket.endpoint}): it has no {MARKER}. Is that the right "
            "bucket, prefix and endpoint?"
        )
    if marker.data != _MARKER_DATA:
        raise UserError(
            f"{bucket.url}/{MARKER} is not {_MARKER_DATA.decode()}",
            "use the version of geb that wrote the store, or another store; if the object is "
            "damaged, write this in its place, then run `geb verify`",
        )


def _local_folder(bucket: Bucket, home: Path) -> Path:
    """The local folder of a store in a bucket, made if there is none yet."""
    # The same bucket name at another endpoint is another bucket.
    identity = f"{FORMAT} {bucket.endpoint} {bucket.url}"
    place = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", f"{bucket.name}-{bucket.prefix}").strip("-")
    root = home / f"{name}-{place}"
    marker = root / MARKER
    with explain_disk_errors(root), exclusive_lock(root / "leases/marker.guard"):
        if not marker.exists():
            # The id tells what this folder wrote in the bucket from what others did.
            facts = {"format": FORMAT, "mirror_of": bucket.url, "id": uuid.uuid4().hex}
            write_atomically(marker, json.dumps(facts))
    return root
