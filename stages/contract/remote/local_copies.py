"""Local copies of the artifacts in a bucket: the manifest first, files when they are read."""

from __future__ import annotations

import shutil
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from stages.contract.disk import explain_disk_errors
from stages.contract.errors import DamagedArtifactError
from stages.contract.file_locks import exclusive_lock
from stages.contract.local_store import LocalStore
from stages.contract.manifest import MANIFEST, Manifest, read_manifest
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.transfer import download_files, is_here
from stages.contract.store import Artifact, OnBytes


@dataclass(frozen=True)
class RemoteArtifact(Artifact):
    """An artifact of a store in a bucket.

    Attributes:
        copies: Copies of the store's artifacts on this host.
        folder: Where the files are, below the store's prefix.
    """

    copies: LocalCopies
    folder: str

    def address(self, path: str = "") -> str:
        """See :class:`Artifact`."""
        return "/".join(part for part in (self.copies.bucket.url, self.folder, path) if part)

    def file(self, path: str = "", on_bytes: OnBytes | None = None) -> Path:
        """See :class:`Artifact`; downloads and checks only the files that are not here yet."""
        self.copies.download(self.manifest, self.folder, path, on_bytes)
        return self.path / path


class LocalCopies:
    """Copies of a bucket's artifacts in the local folder of the store.

    Args:
        bucket: The bucket.
        local: The store in the local folder.
        parts: Folder for what is under way, on the same file system.
    """

    def __init__(self, bucket: Bucket, local: LocalStore, parts: Path) -> None:
        self.bucket = bucket
        self._local = local
        self._parts = parts

    def artifact(self, manifest: Manifest, folder: str) -> RemoteArtifact:
        """The artifact of which the bucket has the files in ``folder``; brings its manifest."""
        self._bring_manifest(manifest)
        return RemoteArtifact(self._path(manifest), manifest, self, folder)

    def download(
        self, manifest: Manifest, folder: str, path: str, on_bytes: OnBytes | None
    ) -> None:
        """Downloads and checks an artifact's file or folder ``path``, but for what is here."""
        place = self._path(manifest)
        with explain_disk_errors(self._local.root), self._guard(manifest):
            files = [
                (f"{folder}/{name}", record, place / name)
                for name, record in manifest.files_at(path).items()
                if not is_here(place / name, record)
            ]
            download_files(self.bucket, files, self._parts, on_bytes)

    def unpushed(self, stage: str, key: str, *, verify: bool) -> Artifact | None:
        """A whole artifact of the local folder; a damaged one is removed.

        Args:
            stage: The artifact's stage.
            key: Its key.
            verify: Hash its files.
        """
        try:
            artifact = self._local.load(stage, key)
            if artifact is not None and verify:
                self._local.verify(artifact)
        except DamagedArtifactError:
            self.drop(stage, key)
            return None
        return artifact

    def drop(self, stage: str, key: str) -> None:
        """Removes what the local folder has of an artifact."""
        shutil.rmtree(self._local.artifact_path(stage, key), ignore_errors=True)

    def _path(self, manifest: Manifest) -> Path:
        return self._local.artifact_path(manifest.stage, manifest.key)

    def _bring_manifest(self, manifest: Manifest) -> None:
        """Makes the local folder of a key that of the bucket's artifact, without its files."""
        folder = self._path(manifest)
        # Asked before the guard as well: a download may hold that for long.
        if _has_manifest(folder, manifest):
            return
        with explain_disk_errors(self._local.root), self._guard(manifest):
            if _has_manifest(folder, manifest):
                return
            shutil.rmtree(folder, ignore_errors=True)
            scratch = self._parts / f"manifest-{uuid.uuid4().hex[:8]}"
            scratch.mkdir(parents=True)
            (scratch / MANIFEST).write_bytes(manifest.model_dump_json(indent=2).encode())
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch.rename(folder)

    def _guard(self, manifest: Manifest) -> AbstractContextManager[None]:
        """One process of this host at a time changes the local files of an artifact."""
        leases = self._local.root / "leases"
        return exclusive_lock(leases / manifest.stage / f"{manifest.key}.files.guard")


def _has_manifest(folder: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder) == manifest
    except DamagedArtifactError:
        return False
