"""Uploads of finished artifacts: the files first, the commit last."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from pathlib import Path

from stages.contract.atomic import write_atomically
from stages.contract.errors import StoreError
from stages.contract.manifest import MANIFEST
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.commits import Commit, Commits
from stages.contract.remote.transfer import upload_files
from stages.contract.store import Artifact, OnBytes


class Uploads:
    """Uploads of artifacts from this host.

    Args:
        bucket: The store's bucket.
        commits: The store's commits.
        pending: Folder of this host that says which uploads are not committed yet.
    """

    def __init__(self, bucket: Bucket, commits: Commits, pending: Path) -> None:
        self._bucket = bucket
        self._commits = commits
        self._pending = pending

    def upload(
        self, artifact: Artifact, *, check_lease: Callable[[], None], on_bytes: OnBytes | None
    ) -> None:
        """Uploads an artifact and commits it, unless there is one under the key by now.

        Args:
            artifact: The artifact; files that an earlier call uploaded stay.
            check_lease: Raises where this host may not compute the key any more.
            on_bytes: Is told what has been uploaded.

        Raises:
            StoreError: A file did not arrive whole.
        """
        manifest = artifact.manifest
        pending = self._pending / f"{manifest.stage}-{manifest.key}"
        folder = _folder(artifact, pending)
        there = self._bucket.list(folder)
        missing = [
            (artifact.path / name, f"{folder}/{name}")
            for name in [*manifest.files, MANIFEST]
            if name not in there or there[name].size != (artifact.path / name).stat().st_size
        ]
        upload_files(self._bucket, missing, on_bytes)
        there = self._bucket.list(folder)
        for name, record in manifest.files.items():
            if name not in there or there[name].size != record.size:
                raise StoreError(
                    f"{self._bucket.url}/{folder}/{name} did not arrive whole; try again"
                )
        etags = {name: there[name].etag for name in manifest.files}
        check_lease()
        self._commits.add(Commit(folder=folder, manifest=manifest, etags=etags))
        pending.unlink()


def _folder(artifact: Artifact, pending: Path) -> str:
    """The folder that an upload goes to: that of the one before if it was not committed."""
    manifest = artifact.manifest
    content = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:16]
    if not pending.exists() or not pending.read_text().startswith(content):
        # Never that of a committed one: its objects may be what is damaged.
        write_atomically(pending, f"{content}-{uuid.uuid4().hex[:8]}")
    return f"artifacts/{manifest.stage}/{manifest.key}/{pending.read_text()}"
