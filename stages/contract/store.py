"""The store: artifacts under content addresses, and what belongs to their making.

Layout under the root::

    store.json                    marks the folder as a store
    artifacts/<stage>/<key>/      an artifact: its files and manifest.json
    artifacts/<stage>/.scratch-*  an artifact being written; renamed into place when whole
    work/<stage>/<key>/           what survives an attempt: mid-training checkpoints, written chunks
    leases/<stage>/<key>          who computes a key right now
    logs/<stage>/<key>/           full log of each attempt
    quarantine/                   damaged artifacts, set aside
    runs/<name>/                  run views: configuration, steps, report
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from stages.contract.digests import sha256_file
from stages.contract.disk import explain_disk_errors
from stages.contract.errors import DamagedArtifactError, StoreError, UserError
from stages.contract.file_lease import FileLease
from stages.contract.lease import Lease
from stages.contract.manifest import MANIFEST, FileRecord, Manifest, describe_file
from stages.contract.request import ArtifactInput

MARKER = "store.json"
FORMAT = 1


@dataclass(frozen=True)
class Artifact:
    """An artifact of the store.

    Attributes:
        path: Its folder on this machine. Read its files by :meth:`file`: they may not be here yet.
        manifest: What it is.
    """

    path: Path
    manifest: Manifest

    def file(self, path: str = "") -> Path:
        """A file or folder of the artifact on this machine, brought here if it was not.

        Raises:
            DamagedArtifactError: What came is not what the manifest says.
        """
        return self.path / path

    def address(self, path: str = "") -> str:
        """Where a file or folder of the artifact is kept, for a person."""
        return str(self.path / path)

    def ref(self, path: str = "") -> ArtifactInput:
        """Reference to the artifact, or to one file or folder of it, for a request."""
        manifest = self.manifest
        return ArtifactInput(
            stage=manifest.stage, key=manifest.key, path=path, digest=manifest.digest(path)
        )


Kind = Literal["artifact", "work", "scratch", "aside"]


@dataclass(frozen=True)
class Held:
    """Something that takes room in a store.

    Attributes:
        kind: An artifact, the state of an attempt, what a killed one left, or what was set aside.
        stage: Its stage; empty where nobody knows.
        key: Its key.
        place: Where it is, below the store's root.
        bytes: Its size.
    """

    kind: Kind
    stage: str
    key: str
    place: str
    bytes: int


class Store:
    """A store on a local or shared file system.

    Args:
        root: The store's folder, as :meth:`open` checked it.
        mirror_of: URL of the store in a bucket whose local folder this is, if it is one.
    """

    def __init__(self, root: Path, mirror_of: str | None = None) -> None:
        self.root = root
        self.mirror_of = mirror_of

    @property
    def location(self) -> str:
        """What opens this store again, on any host that sees it."""
        return str(self.root)

    @classmethod
    def open(cls, location: str, *, create: bool = False) -> Store:
        """Opens the store at ``location``.

        Args:
            location: Folder of the store.
            create: Make an empty store where there is nothing yet.

        Raises:
            UserError: The location is a URL, or a folder that is no store.
            StoreError: There is no store, or it cannot be read. Nothing is ever recomputed because
                of it.
        """
        if "://" in location:
            raise UserError(
                f"store {location!r} is a URL, and stages work in folders",
                "open it with stages.contract.stores.open_store",
            )
        root = Path(location).expanduser().absolute()
        marker = root / MARKER
        if create and not marker.exists():
            if root.exists() and any(root.iterdir()):
                raise UserError(
                    f"{root} is not empty and holds no {MARKER}: it is not a store",
                    "set `store` to a store or to an empty or new folder",
                )
            with explain_disk_errors(root):
                root.mkdir(parents=True, exist_ok=True)
                marker.write_text(json.dumps({"format": FORMAT}))
        try:
            found = json.loads(marker.read_text())
        except OSError as error:
            raise StoreError(
                f"no store at {root}: {error.strerror}. Is the file system mounted?"
            ) from error
        if found.get("format") != FORMAT:
            raise UserError(
                f"{root} is a store of format {found.get('format')}; this version reads {FORMAT}",
                "use the version of geb that wrote it, or another store",
            )
        return cls(root, found.get("mirror_of"))

    def artifact_path(self, stage: str, key: str) -> Path:
        """Where the artifact of a key is or will be."""
        return self.root / "artifacts" / stage / key

    def work_path(self, stage: str, key: str) -> Path:
        """Folder that survives failed attempts at a key and goes when the artifact is there."""
        return self.root / "work" / stage / key

    def log_path(self, stage: str, key: str) -> Path:
        """Folder of the logs of a key's attempts."""
        return self.root / "logs" / stage / key

    def run_path(self, run: str) -> Path:
        """Folder of a run's view."""
        return self.root / "runs" / run

    def lease(self, stage: str, key: str) -> Lease:
        """The lease on computing a key."""
        return FileLease(self.root / "leases" / stage / key)

    def load(self, stage: str, key: str, path: str = "") -> Artifact | None:
        """Finds and checks an artifact.

        Sizes are compared always; a file whose modification time is not the one in the manifest is
        hashed as well.

        Args:
            stage: The artifact's stage.
            key: Its key.
            path: File or folder of it that is checked; all of it if empty.

        Returns:
            The artifact, or None when there is nothing under the key.

        Raises:
            StoreError: The store cannot be read.
            DamagedArtifactError: The artifact is not what its manifest says.
        """
        if not (self.root / MARKER).exists():
            raise StoreError(f"the store at {self.root} is gone. Is the file system mounted?")
        folder = self.artifact_path(stage, key)
        if not folder.exists():
            return None
        manifest = read_manifest(folder)
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
        """Makes the records in a folder of the store (``runs/<name>``) those that all hosts see."""

    def share(self, path: Path) -> str:
        """Shows a file of the store, or all files of a folder, to all hosts.

        Returns:
            Where it is kept, for a person.
        """
        return str(path)

    @contextmanager
    def exclusive(self, folder: str) -> Iterator[None]:
        """Keeps other hosts from the records in a folder, and shows them what is changed within."""
        yield

    def find(self, stage: str, key: str, *, warn: Callable[[str], None]) -> Artifact | None:
        """Like :meth:`load`, but sets a damaged artifact aside, says so, and returns None."""
        try:
            return self.load(stage, key)
        except DamagedArtifactError as error:
            aside = self.set_aside(stage, key)
            warn(f"{error}. Set aside in {aside}; the stage runs again.")
            return None

    def verify(self, artifact: Artifact) -> None:
        """Hashes every file of an artifact.

        Raises:
            DamagedArtifactError: A file is missing or differs, or is there and not in the manifest:
                a checkpoint's loader would read it (`adapter_config.json`).
        """
        for name, record in artifact.manifest.files.items():
            check_file(artifact.path / name, record, always_hash=True)
        there = (each for each in artifact.path.rglob("*") if not each.is_dir())
        names = {each.relative_to(artifact.path).as_posix() for each in there}
        if unlisted := sorted(names - {*artifact.manifest.files, MANIFEST}):
            raise DamagedArtifactError(
                f"damaged artifact: {artifact.path} holds files that its {MANIFEST} does not list: "
                f"{', '.join(unlisted[:5])}"
            )

    def set_aside(self, stage: str, key: str) -> str:
        """Moves an artifact into quarantine and returns its new place."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = self.root / "quarantine" / f"{stage}-{key[:16]}-{stamp}-{uuid.uuid4().hex[:6]}"
        aside.parent.mkdir(exist_ok=True)
        self.artifact_path(stage, key).rename(aside)
        return str(aside)

    def new_scratch(self, stage: str, key: str) -> Path:
        """Creates the folder in which an artifact is written before it is published."""
        scratch = self.root / "artifacts" / stage / f".scratch-{key[:16]}-{uuid.uuid4().hex[:8]}"
        scratch.mkdir(parents=True)
        return scratch

    def publish(self, scratch: Path, manifest: Manifest) -> Artifact:
        """Makes ``scratch`` the artifact of its key: manifest last, then one rename.

        Where the key has an artifact by now, that one stays and the scratch is dropped.
        """
        (scratch / MANIFEST).write_text(manifest.model_dump_json(indent=2))
        for path in [*scratch.rglob("*"), scratch]:
            _fsync(path)
        target = self.artifact_path(manifest.stage, manifest.key)
        try:
            scratch.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(scratch)
            return Artifact(target, read_manifest(target))
        _fsync(target.parent)
        shutil.rmtree(self.work_path(manifest.stage, manifest.key), ignore_errors=True)
        return Artifact(target, manifest)

    def artifacts(self, stage: str | None = None) -> Iterator[tuple[str, str]]:
        """Yields (stage, key) of all artifacts, in order of their names."""
        for folder in sorted((self.root / "artifacts").glob(f"{stage or '*'}/*")):
            if not folder.name.startswith(".scratch-"):
                yield folder.parent.name, folder.name

    def held(self) -> Iterator[Held]:
        """Yields everything that garbage collection may have an opinion on."""
        for stage, key in self.artifacts():
            yield self._held("artifact", stage, key, self.artifact_path(stage, key))
        for path in (self.root / "work").glob("*/*"):
            yield self._held("work", path.parent.name, path.name, path)
        for path in (self.root / "artifacts").glob("*/.scratch-*"):
            stage = path.parent.name
            start = path.name.removeprefix(".scratch-").partition("-")[0]
            leases = (self.root / "leases" / stage).glob(f"{start}*")
            key = next((each.name for each in leases if "." not in each.name), start)
            yield self._held("scratch", stage, key, path)
        for path in (self.root / "quarantine").glob("*"):
            yield self._held("aside", "", "", path)

    def _held(self, kind: Kind, stage: str, key: str, path: Path) -> Held:
        return Held(kind, stage, key, path.relative_to(self.root).as_posix(), _bytes_of(path))

    def remove(self, held: Held) -> None:
        """Deletes something that :meth:`held` told of; it disappears at once, or not at all."""
        path = self.root / held.place
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        # Another collection may be at it; what both leave is found by the next one.
        with contextlib.suppress(FileNotFoundError):
            if held.kind == "artifact":
                path = path.rename(
                    path.with_name(f".scratch-{held.key[:16]}-{uuid.uuid4().hex[:8]}")
                )
            shutil.rmtree(path)

    def sweep_scratch(self, stage: str, key: str) -> None:
        """Removes what dead attempts at a key left. Call it while holding the key's lease."""
        for stale in (self.root / "artifacts" / stage).glob(f".scratch-{key[:16]}-*"):
            shutil.rmtree(stale)


def _bytes_of(path: Path) -> int:
    """Size of a file, or of all files of a folder; what goes meanwhile does not count."""
    total = 0
    for each in (path,) if path.is_symlink() else (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = each.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def describe_files(scratch: Path, telemetry: set[str]) -> dict[str, FileRecord]:
    """Measures all files under ``scratch`` and makes them readable for everyone.

    Libraries write checkpoints with mode 0600, which a container of another user could not read.
    """
    files = {}
    for path in sorted(scratch.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        if path.is_file():
            name = path.relative_to(scratch).as_posix()
            files[name] = describe_file(path, telemetry=name in telemetry)
    return files


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the artifact at ``path``.

    Raises:
        DamagedArtifactError: It is missing or unreadable.
    """
    try:
        return Manifest.model_validate_json((path / MANIFEST).read_text())
    except (FileNotFoundError, ValidationError, UnicodeDecodeError) as error:
        raise DamagedArtifactError(
            f"damaged artifact {path.parent.name}/{path.name[:12]}: its {MANIFEST} is missing or "
            "unreadable"
        ) from error


def check_file(path: Path, record: FileRecord, *, always_hash: bool) -> None:
    """Compares a file with its record.

    Raises:
        DamagedArtifactError: It is missing or differs.
    """
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise DamagedArtifactError(f"damaged artifact: {path} is missing") from error
    if found.st_size != record.size:
        raise DamagedArtifactError(
            f"damaged artifact: {path} has {found.st_size} bytes, not {record.size}"
        )
    suspicious = always_hash or found.st_mtime_ns != record.mtime_ns
    if suspicious and sha256_file(path) != record.sha256:
        raise DamagedArtifactError(f"damaged artifact: the content of {path} has changed")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
