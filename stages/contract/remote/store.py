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

import hashlib
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stages.contract.atomic import write_atomically
from stages.contract.disk import explain_disk_errors
from stages.contract.errors import DamagedArtifactError, StoreError
from stages.contract.file_locks import exclusive_lock
from stages.contract.local_store import LocalStore
from stages.contract.manifest import MANIFEST, Manifest, read_manifest
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.commits import Commit, Commits
from stages.contract.remote.external_inputs import ExternalInputs
from stages.contract.remote.folders import SyncedFolders
from stages.contract.remote.lease import RemoteLease
from stages.contract.remote.opening import check_marker, folder_id, local_folder
from stages.contract.remote.transfer import download_files, hash_object, is_here, upload_files
from stages.contract.remote.usage import held, remove
from stages.contract.remote.work import RemoteWork
from stages.contract.store import Artifact, Held, OnBytes, Store

_PARTS = ".parts"
_PUSHES = ".pushes"


@dataclass(frozen=True)
class RemoteArtifact(Artifact):
    """An artifact of a store in a bucket.

    Attributes:
        store: The store.
        folder: Where the files are, below the store's prefix.
    """

    store: RemoteStore
    folder: str

    def address(self, path: str = "") -> str:
        """See :class:`Artifact`."""
        return "/".join(part for part in (self.store.location, self.folder, path) if part)

    def file(self, path: str = "", on_bytes: OnBytes | None = None) -> Path:
        """See :class:`Artifact`; downloads and checks only the files that are not here yet."""
        with explain_disk_errors(self.store.root), self.store.guard(self.manifest):
            files = [
                (f"{self.folder}/{name}", record, self.path / name)
                for name, record in self.manifest.files_at(path).items()
                if not is_here(self.path / name, record)
            ]
            download_files(self.store.bucket, files, self.store.root / _PARTS, on_bytes)
        return self.path / path


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
        self._commits = Commits(bucket)
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
        shutil.rmtree(self.local.artifact_path(stage, key), ignore_errors=True)

    def unpushed(self, stage: str, key: str, *, verify: bool = True) -> Artifact | None:
        """An artifact that is whole in the local folder and not in the bucket.

        Anything else that is there under the key is removed. Call it while holding the key's lease
        and when the bucket has nothing under the key.

        Args:
            stage: The artifact's stage.
            key: Its key.
            verify: Hash its files; without, a stage has only just done so.
        """
        try:
            artifact = self.local.load(stage, key)
            if artifact is not None and verify:
                self.local.verify(artifact)
        except DamagedArtifactError:
            self.drop_local(stage, key)
            return None
        return artifact

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
        self._adopt(commit.manifest)
        place = self.local.artifact_path(stage, key)
        return RemoteArtifact(place, commit.manifest, self, commit.folder)

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
        manifest = artifact.manifest
        stage, key = manifest.stage, manifest.key
        pending = self.root / _PUSHES / f"{stage}-{key}"
        folder = self._push_folder(artifact, pending)
        there = self.bucket.list(folder)
        missing = [
            (artifact.path / name, f"{folder}/{name}")
            for name in [*manifest.files, MANIFEST]
            if name not in there or there[name].size != (artifact.path / name).stat().st_size
        ]
        upload_files(self.bucket, missing, on_bytes)
        there = self.bucket.list(folder)
        for name, record in manifest.files.items():
            if name not in there or there[name].size != record.size:
                raise StoreError(f"{self.location}/{folder}/{name} did not arrive whole; try again")
        etags = {name: there[name].etag for name in manifest.files}
        check_lease()
        self._commits.add(Commit(folder=folder, manifest=manifest, etags=etags))
        pending.unlink()
        committed = self.load(stage, key)
        if committed is None:
            raise StoreError(f"{stage}/{key} has gone from {self.location} again; try again")
        return committed

    def _push_folder(self, artifact: Artifact, pending: Path) -> str:
        """The folder that an upload goes to: that of the one before if it was not committed."""
        manifest = artifact.manifest
        content = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:16]
        if not pending.exists() or not pending.read_text().startswith(content):
            # Never that of a committed one: its objects may be what is damaged.
            write_atomically(pending, f"{content}-{uuid.uuid4().hex[:8]}")
        return f"artifacts/{manifest.stage}/{manifest.key}/{pending.read_text()}"

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
        """See :class:`Store`."""
        self._folders.pull(folder)

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
            self._folders.pull(folder, exact=True)
            yield
            lease.check()
            self._folders.push_changes(folder)

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

    def _adopt(self, manifest: Manifest) -> None:
        """Makes the local folder of a key that of the bucket's artifact; files come on demand."""
        folder = self.local.artifact_path(manifest.stage, manifest.key)
        # Asked before the guard as well: who downloads from it may hold that for long.
        if _has_manifest(folder, manifest):
            return
        with explain_disk_errors(self.root), self.guard(manifest):
            if _has_manifest(folder, manifest):
                return
            shutil.rmtree(folder, ignore_errors=True)
            scratch = self.root / _PARTS / f"manifest-{uuid.uuid4().hex[:8]}"
            scratch.mkdir(parents=True)
            (scratch / MANIFEST).write_text(manifest.model_dump_json(indent=2))
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch.rename(folder)

    def guard(self, manifest: Manifest) -> AbstractContextManager[None]:
        """One process of this host at a time changes the local files of an artifact."""
        return exclusive_lock(self.root / "leases" / manifest.stage / f"{manifest.key}.files.guard")


def _has_manifest(folder: Path, manifest: Manifest) -> bool:
    try:
        return read_manifest(folder) == manifest
    except DamagedArtifactError:
        return False
