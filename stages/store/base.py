"""A store in a folder of a local or shared file system.

Layout under the root::

    store.json                    marks the folder as a store
    artifacts/<stage>/<key>/      an artifact: its files and manifest.json
    artifacts/<stage>/.scratch-*  an artifact being written; renamed into place when whole
    work/<stage>/<key>/           resumable state of attempts: checkpoints, written chunks
    leases/<stage>/<key>          the process that computes a key right now
    logs/<stage>/<key>/           full log of each attempt
    quarantine/                   artifacts set aside: damaged, or computed again
    orchestrators/<stage>/<key>   sign of life that stages on a cluster wait for
    runs/<name>/                  run records: configuration, steps, report
    slurm/jobs/<name>/            output and end of a job of Slurm
    models/                       the model registry
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract.atomic import fsync, write_atomically
from stages.contract.digests import files_by_name
from stages.contract.errors import (
    DamagedArtifactError,
    DamagedRecordError,
    NoStoreError,
    StoreError,
    UserError,
)
from stages.contract.manifest import MANIFEST, Manifest, check_file, read_manifest, verify_files
from stages.contract.records import read_record
from stages.contract.request import ArtifactInput
from stages.store.locks import FileLease
from stages.store.usage import LEVELS, SCRATCH, StoreEntry, entries_of

MARKER = "store.json"
FORMAT = 2
_MARKER_REMEDY = (
    f"write {json.dumps({'format': FORMAT})} in its place, then run `geb verify`; of a bucket's "
    "cache (`GEB_CACHE`), remove the whole folder"
)


@dataclass(frozen=True)
class Artifact:
    """An artifact of the store."""

    path: Path
    """Its folder on this machine. Read its files by :meth:`file`: they may not be here yet."""
    manifest: Manifest

    def file(self, path: str = "") -> Path:
        """A file or folder of the artifact on this machine, brought here if it was not.

        An empty ``path`` is all of it.

        Raises:
            DamagedArtifactError: What came is not what the manifest says.
        """
        return self.path / path

    def read_json(self, path: str) -> dict[str, Any]:
        """Content of a file that holds one JSON object; DamagedArtifactError if it does not."""
        try:
            return read_record(self.file(path), dict[str, Any])
        except DamagedRecordError as error:
            raise DamagedArtifactError(
                f"{error}; delete the folder {self.path}, and `geb resume` computes it again"
            ) from error

    def address(self, path: str = "") -> str:
        """Address of a file or folder of the artifact, for a person."""
        return str(self.path / path)

    def ref(self, path: str = "") -> ArtifactInput:
        """Reference to the artifact, or to one file or folder of it, for a request."""
        manifest = self.manifest
        return ArtifactInput(
            stage=manifest.stage, key=manifest.key, path=path, digest=manifest.digest(path)
        )


class Store:
    """A store of artifacts, leases, run records and registered models, in a folder.

    :class:`~stages.store.remote.store.RemoteStore` is one that a bucket mirrors.
    """

    left_seconds = 0.0
    """Age of what a killed attempt left, from which on it counts for garbage collection."""

    def __init__(self, root: Path, mirror_of: str | None = None) -> None:
        self.root = root
        self.location = str(root)
        """Address that opens this store again, on any host that sees it."""
        self.mirror_of = mirror_of
        """URL of the store in a bucket whose local folder this is, if it is one."""

    @property
    def folder_id(self) -> str:
        """Id of this folder, which one at the same path of another host does not have."""
        return str(read_marker(self.root, create=False).get("id", ""))

    @property
    def identity(self) -> str:
        """Path and id of this folder."""
        return f"{self.root}#{self.folder_id}"

    @classmethod
    def in_folder(cls, location: str, *, create: bool = False) -> Store:
        """Opens the store in a folder; with ``create`` makes an empty one if there is nothing yet.

        See :func:`stages.store.opening.open_store` for errors.
        """
        root = Path(location).expanduser().absolute()
        return cls(root, read_marker(root, create=create).get("mirror_of"))

    def run_path(self, run: str) -> Path:
        """Folder of a run's record."""
        return self.root / "runs" / run

    def artifact_path(self, stage: str, key: str) -> Path:
        """Folder of a key's artifact, whether it is there or not."""
        return self.root / "artifacts" / stage / key

    def work_path(self, stage: str, key: str) -> Path:
        """Folder that survives failed attempts at a key and goes when the artifact is there."""
        return self.root / "work" / stage / key

    def work_files(self, stage: str, key: str) -> frozenset[str]:
        """Names and sizes of what attempts at a key have saved so far: checkpoints, chunks.

        An attempt that got further than the one before has saved a new file, or more in one. Names
        of what is being written begin with a dot.
        """
        work = self.work_path(stage, key)
        files = (path for path in work.rglob("*") if path.is_file())
        names = (f"{path.relative_to(work)} {path.stat().st_size}" for path in files)
        return frozenset(name for name in names if "/." not in f"/{name}")

    def drop_work(self, stage: str, key: str) -> None:
        """Removes what attempts at a key have saved, unless one is at work."""
        if self.lease(stage, key).holder() is None:
            shutil.rmtree(self.work_path(stage, key), ignore_errors=True)

    def log_path(self, stage: str, key: str) -> Path:
        """Folder of the logs of a key's attempts."""
        return self.root / "logs" / stage / key

    def orchestrator_path(self, stage: str, key: str) -> Path:
        """File that the orchestrator that looks after the work at a key renews while it lives."""
        return self.root / "orchestrators" / stage / key

    def lease(self, stage: str, key: str) -> FileLease:
        """The lease on computing a key."""
        return FileLease(self.root / "leases" / stage / key)

    def load(self, stage: str, key: str, path: str = "") -> Artifact | None:
        """Finds an artifact and checks ``path`` of it; None when there is nothing under the key.

        Sizes are compared always; a file whose modification time is not the one in the manifest is
        hashed as well.

        Raises:
            StoreError: The store cannot be read.
            DamagedArtifactError: The artifact is not what its manifest says.
        """
        if not (self.root / MARKER).exists():
            raise StoreError(f"the store at {self.root} is gone. Is the file system mounted?")
        manifest = self.manifest(stage, key)
        if manifest is None:
            return None
        folder = self.artifact_path(stage, key)
        for name, record in manifest.files_at(path).items():
            check_file(folder / name, record, always_hash=False)
        return Artifact(folder, manifest)

    def manifest(self, stage: str, key: str) -> Manifest | None:
        """An artifact's manifest, its files unchecked; None when there is nothing under the key.

        Raises:
            DamagedArtifactError: It cannot be read.
        """
        folder = self.artifact_path(stage, key)
        return read_manifest(folder) if folder.exists() else None

    def refresh(self, folder: str) -> None:
        """Updates the records in a folder of the store (``runs/<name>``) from other hosts."""

    def write(self, path: Path, text: str) -> str:
        """Writes a record for all hosts; returns its address, for a person."""
        write_atomically(path, text)
        return str(path)

    def share(self, path: Path) -> str:
        """Shows a file of the store to all hosts; returns its address, for a person."""
        return str(path)

    def exclusive(self, folder: str) -> AbstractContextManager[None]:
        """Keeps other hosts from the records in a folder, and shows them what is changed within."""
        return contextlib.nullcontext()

    def find(self, stage: str, key: str, *, warn: Callable[[str], None]) -> Artifact | None:
        """Like :meth:`load`, but sets a damaged artifact aside with a warning and returns None."""
        try:
            return self.load(stage, key)
        except DamagedArtifactError as error:
            # Runs that share the artifact may find the damage at once: the first sets it aside.
            with contextlib.suppress(FileNotFoundError):
                aside = self.set_aside(stage, key)
                warn(f"{error}. Set aside in {aside}; the stage runs again.")
            return None

    def verify(self, artifact: Artifact) -> None:
        """Hashes every file of an artifact.

        Raises:
            DamagedArtifactError: A file is missing or differs, or is there and not in the manifest:
                a checkpoint's loader would read it (`adapter_config.json`).
        """
        verify_files(artifact.path, artifact.manifest.files)
        names = files_by_name(artifact.path).keys()
        if unlisted := sorted(names - {*artifact.manifest.files, MANIFEST}):
            raise DamagedArtifactError(
                f"damaged artifact: {artifact.path} holds files that its {MANIFEST} does not list: "
                f"{', '.join(unlisted[:5])}"
            )

    def set_aside(self, stage: str, key: str) -> str:
        """Moves an artifact into quarantine and returns its new place."""
        aside = self.root / quarantine_place(stage, key)
        aside.parent.mkdir(exist_ok=True)
        self.artifact_path(stage, key).rename(aside)
        return str(aside)

    def new_scratch(self, stage: str, key: str) -> Path:
        """Creates the folder in which an artifact is written before it is published.

        The caller holds the key's lease: folders of dead attempts at the key go.
        """
        for stale in (self.root / "artifacts" / stage).glob(f".scratch-{key}-*"):
            shutil.rmtree(stale)
        scratch = self.root / "artifacts" / stage / _scratch_name(key)
        scratch.mkdir(parents=True)
        return scratch

    def publish(self, scratch: Path, manifest: Manifest) -> Artifact:
        """Makes ``scratch`` the artifact of its key: manifest last, then one rename.

        If another process published the key first, its artifact stays and the scratch goes.
        """
        # Libraries write checkpoints with mode 0600, which a container of another user could not
        # read.
        for path in scratch.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (scratch / MANIFEST).write_bytes(manifest.model_dump_json(indent=2).encode())
        for path in [*scratch.rglob("*"), scratch]:
            fsync(path)
        target = self.artifact_path(manifest.stage, manifest.key)
        try:
            scratch.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(scratch)
            return Artifact(target, read_manifest(target))
        fsync(target.parent)
        shutil.rmtree(self.work_path(manifest.stage, manifest.key), ignore_errors=True)
        return Artifact(target, manifest)

    def artifacts(self) -> Iterator[tuple[str, str]]:
        """Yields (stage, key) of all artifacts, in order of their names."""
        for folder in sorted((self.root / "artifacts").glob("*/*")):
            if not folder.name.startswith(SCRATCH):
                yield folder.parent.name, folder.name

    def entries(self) -> Iterator[StoreEntry]:
        """Yields everything that takes room, for garbage collection."""
        contents = [entry for folder in LEVELS for entry in self.contents(folder)]
        # Listed last: what is published meanwhile is an artifact, not what an attempt left.
        return entries_of(contents, set(self.artifacts()), self.left_seconds)

    def contents(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """Yields name, bytes and time of the last write of everything below a folder."""
        # Files removed meanwhile do not count. A stage's folder may be a link.
        for stage in (self.root / folder).glob("*"):
            paths = [stage]
            for place, folders, files in os.walk(stage):
                paths += [Path(place, name) for name in (*folders, *files)]
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    yield path.relative_to(self.root).as_posix(), size, status.st_mtime

    def remove(self, gone: StoreEntry) -> None:
        """Deletes an entry of :meth:`entries`; it disappears at once, or not at all."""
        path = self.root / gone.place
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        # Another collection may be at it; what both leave is found by the next one.
        with contextlib.suppress(FileNotFoundError):
            if gone.kind == "artifact":
                path = path.rename(path.with_name(_scratch_name(gone.key)))
            shutil.rmtree(path)


def _scratch_name(key: str) -> str:
    """A new name for a folder that holds no artifact of its key yet, or not any longer."""
    return f"{SCRATCH}{key}-{uuid.uuid4().hex[:8]}"


def quarantine_place(stage: str, key: str) -> str:
    """A new place for a damaged artifact, below the store's root."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"quarantine/{stage}-{key[:16]}-{stamp}-{uuid.uuid4().hex[:6]}"


def read_marker(root: Path, *, create: bool) -> dict[str, Any]:
    """Content of the marker of the store in a folder; with ``create`` see :meth:`Store.in_folder`.

    Raises:
        UserError: The folder holds another thing, or a store of another format.
        NoStoreError: The store is missing.
    """
    marker = root / MARKER
    if create and not marker.exists():
        _require_empty(root)
        write_atomically(marker, json.dumps({"format": FORMAT, "id": uuid.uuid4().hex}))
    try:
        content = read_record(marker, dict[str, Any], _MARKER_REMEDY)
    except OSError as error:
        raise NoStoreError(
            f"no store at {root}: {error.strerror}. Is the path right, and the file system mounted?"
        ) from error
    if content.get("format") != FORMAT:
        raise UserError(
            f"{root} is a store of format {content.get('format')}; this version reads {FORMAT}",
            "use the version of geb that wrote it, or another store",
        )
    return content


def _require_empty(root: Path) -> None:
    """Refuses to make a store where something else is."""
    occupied = root.exists() and (
        not root.is_dir() or any(MARKER not in path.name for path in root.iterdir())
    )
    # Another process may have made the store meanwhile; it writes the marker first.
    if occupied and not (root / MARKER).exists():
        raise UserError(
            f"{root} is not an empty folder and holds no {MARKER}: it is not a store",
            "set `store` to a store or to an empty or new folder",
        )
