"""A store in a bucket, seen through a local folder.

Layout of the bucket below the store's prefix::

    store.json                             marks the prefix as a store
    commits/<stage>/<key>.json             an artifact: its manifest, and where its files are
    artifacts/<stage>/<key>/<upload>/      the files, as one host uploaded them
    work/<stage>/<key>/                    resumable state of attempts, see `work.py`
    leases/                                the host that computes a key right now, see `lease.py`
    inputs/<digest>/                       external inputs, see `external_inputs.py`
    logs/ runs/ models/                    as in a local store, see `folders.py`
    quarantine/<name>.json                 commits of damaged artifacts, set aside

An artifact exists once its commit does: one write, on condition that there is none. The local
folder is a store of its own, in which stages work; it may be removed whenever no stage runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.contract.errors import DamagedArtifactError, StoreError
from stages.contract.file_locks import exclusive_lock, try_lock
from stages.contract.local_store import LocalStore
from stages.contract.manifest import Manifest
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.commits import Commit, Commits
from stages.contract.remote.external_inputs import ExternalInputs
from stages.contract.remote.folders import SyncedFolders
from stages.contract.remote.lease import RemoteLease
from stages.contract.remote.local_copies import LocalCopies, RemoteArtifact
from stages.contract.remote.opening import check_marker, folder_id, local_folder
from stages.contract.remote.transfer import hash_object
from stages.contract.remote.uploads import Uploads
from stages.contract.remote.usage import held, remove
from stages.contract.remote.work import RemoteWork
from stages.contract.store import Artifact, Held, OnBytes, Store

_PARTS = ".parts"
_PUSHES = ".pushes"


class RemoteStore(Store):
    """A store in a bucket, and the store in the local folder that it is filled from.

    Args:
        bucket: The bucket, as :meth:`connect` checked it.
        root: Its local folder.

    Attributes:
        bucket: The bucket.
        local: The store that stages on this host see.
        external_inputs: Inputs from outside the store that the bucket keeps for other hosts.
    """

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self.root = root
        self.location = bucket.url
        self.bucket = bucket
        self.local = LocalStore(root, mirror_of=bucket.url)
        self.external_inputs = ExternalInputs(bucket, root / "inputs", root / _PARTS)
        self._copies = LocalCopies(bucket, self.local, root / _PARTS)
        self._commits = Commits(bucket)
        self._uploads = Uploads(bucket, self._commits, root / _PUSHES)
        self._folders = SyncedFolders(bucket, root)

    @classmethod
    def connect(cls, url: str, home: Path, *, create: bool = False) -> RemoteStore:
        """Opens the store at ``url``.

        Args:
            url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
            home: Where this host keeps the local folders of such stores.
            create: Make an empty store where there is nothing yet.

        Raises:
            UserError: The URL, the bucket or the credentials are wrong, or the prefix is no store.
            StoreError: The bucket cannot be reached, or has no store there.
        """
        bucket = Bucket(url)
        check_marker(bucket.impatient(), create=create)
        return cls(bucket, local_folder(bucket, home))

    def work(self, stage: str, key: str) -> RemoteWork:
        """Resumable state of attempts at a key, here and in the bucket."""
        return RemoteWork(
            self.bucket,
            f"work/{stage}/{key}",
            self.local.work_path(stage, key),
            self.local.artifact_path(stage, key),
            scratch=self.root / _PARTS,
            writer=folder_id(self.root),
        )

    def work_files(self, stage: str, key: str) -> frozenset[str]:
        """See :class:`~stages.contract.store.Store`: those of the last snapshot."""
        return self.work(stage, key).files()

    def drop_local(self, stage: str, key: str) -> None:
        """Removes what the local folder has of an artifact."""
        self._copies.drop(stage, key)

    def unpushed(self, stage: str, key: str, *, verify: bool = True) -> Artifact | None:
        """An artifact that is whole in the local folder and not in the bucket.

        Anything else that is there under the key is removed. Call it while holding the key's lease
        and when the bucket has nothing under the key.

        Args:
            stage: The artifact's stage.
            key: Its key.
            verify: Hash its files; without, a stage has only just done so.
        """
        return self._copies.unpushed(stage, key, verify=verify)

    def lease(self, stage: str, key: str) -> RemoteLease:
        """See :class:`Store`."""
        return RemoteLease(self.bucket, f"leases/{stage}/{key}.json")

    def load(self, stage: str, key: str, path: str = "") -> RemoteArtifact | None:
        """Finds and checks an artifact in the bucket; only its manifest is brought here.

        Sizes are compared always; an object whose ETag is not the one of the commit is hashed.

        Raises:
            StoreError: The bucket cannot be read.
            DamagedArtifactError: The artifact is not what its manifest says.
        """
        commit = self._commits.get(stage, key)
        if commit is None:
            return None
        listed = self.bucket.list(commit.folder)
        etags = dict(commit.etags)
        for name, record in commit.manifest.files_at(path).items():
            where = f"{self.location}/{commit.folder}/{name}"
            entry = listed.get(name)
            if entry is None:
                raise DamagedArtifactError(f"damaged artifact: {where} is missing")
            if entry.size != record.size:
                raise DamagedArtifactError(
                    f"damaged artifact: {where} has {entry.size} bytes, not {record.size}"
                )
            if entry.etag != commit.etags.get(name):
                self._check_content(commit, name)
                etags[name] = entry.etag
        if etags != commit.etags:
            # Another copy of the same content, as after a move to another bucket.
            self._commits.update(commit.model_copy(update={"etags": etags}))
        return self._copies.artifact(commit.manifest, commit.folder)

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """See :class:`Store`."""
        commit = self._commits.get(stage, key)
        return None if commit is None else commit.manifest

    def verify(self, artifact: Artifact) -> None:
        """See :class:`Store`; what it reads is not kept."""
        commit = self._commits.get(artifact.manifest.stage, artifact.manifest.key)
        if commit is not None:
            for name in commit.manifest.files:
                self._check_content(commit, name)

    def push(
        self,
        artifact: Artifact,
        *,
        check_lease: Callable[[], None],
        on_bytes: OnBytes | None = None,
    ) -> Artifact:
        """Uploads a finished artifact of the local folder: files first, the commit last.

        Where the bucket has an artifact under the key by now, that one stays.

        Args:
            artifact: The artifact; files that an earlier call uploaded stay.
            check_lease: Raises where this host may not compute the key any more.
            on_bytes: Is told what has been uploaded.
        """
        self._uploads.upload(artifact, check_lease=check_lease, on_bytes=on_bytes)
        stage, key = artifact.manifest.stage, artifact.manifest.key
        committed = self.load(stage, key)
        if committed is None:
            raise StoreError(f"{stage}/{key} has gone from {self.location} again; try again")
        return committed

    def find(self, stage: str, key: str, *, warn: Callable[[str], None]) -> Artifact | None:
        """See :class:`Store`; a whole copy on this host stays, and is uploaded again."""
        try:
            return self.load(stage, key)
        except DamagedArtifactError as error:
            aside = self._commits.set_aside(stage, key)
            warn(f"{error}. Set aside in {aside}; the stage runs again.")
            return None

    def set_aside(self, stage: str, key: str) -> str:
        """See :class:`Store`; what is here of it goes."""
        self.drop_local(stage, key)
        return self._commits.set_aside(stage, key)

    def artifacts(self, stage: str | None = None) -> Iterator[tuple[str, str]]:
        """See :class:`Store`."""
        return (each for each in self._commits.names() if stage in (None, each[0]))

    def held(self) -> Iterator[Held]:
        """See :class:`Store`."""
        return held(self.bucket, self._commits)

    def remove(self, gone: Held) -> None:
        """See :class:`Store`; what is here of it goes as well."""
        remove(self.bucket, self._commits, gone)
        if gone.kind == "artifact":
            self.drop_local(gone.stage, gone.key)
        if gone.kind == "work":
            shutil.rmtree(self.local.work_path(gone.stage, gone.key), ignore_errors=True)

    def refresh(self, folder: str) -> None:
        """See :class:`Store`; records that this host is changing stay as they are until then."""
        descriptor = try_lock(self._changing(folder), shared=True)
        if descriptor is not None:
            try:
                self._folders.pull(folder)
            finally:
                os.close(descriptor)

    def share(self, path: Path) -> str:
        """See :class:`Store`."""
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        self._folders.push([each.relative_to(self.root).as_posix() for each in files])
        return f"{self.location}/{path.relative_to(self.root).as_posix()}"

    @contextmanager
    def exclusive(self, folder: str) -> Iterator[None]:
        """See :class:`Store`.

        Raises:
            ConflictError: Somebody who holds no lease changed the records meanwhile.
        """
        with RemoteLease(self.bucket, f"leases/{folder}.json") as lease:
            lease.acquire()
            # Or a refresh by another process of this host would undo what is not pushed yet.
            with exclusive_lock(self._changing(folder)):
                self._folders.pull(folder, exact=True)
                yield
                lease.check()
                self._folders.push_changes(folder)

    def _changing(self, folder: str) -> Path:
        """File that is locked on this host while the records of a folder are changed."""
        return self.root / "leases" / f"{folder}.changing"

    def _check_content(self, commit: Commit, name: str) -> None:
        record = commit.manifest.files[name]
        where = f"{commit.folder}/{name}"
        try:
            digest = hash_object(self.bucket, where, record.size)
        except FileNotFoundError as error:
            raise DamagedArtifactError(f"damaged artifact: {error} is missing") from error
        if digest != record.sha256:
            raise DamagedArtifactError(
                f"damaged artifact: the content of {self.location}/{where} has changed"
            )
