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

import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from stages.contract.digests import sha256_file
from stages.contract.errors import DamagedArtifactError, StoreError, UserError
from stages.contract.lease import Lease
from stages.contract.manifest import MANIFEST, FileRecord, Manifest, describe_file
from stages.contract.request import ArtifactInput

_MARKER = "store.json"
_FORMAT = 1


@dataclass(frozen=True)
class Artifact:
    """A whole artifact of the store."""

    path: Path
    manifest: Manifest

    def ref(self, path: str = "") -> ArtifactInput:
        """Reference to the artifact, or to one file or folder of it, for a request."""
        manifest = self.manifest
        return ArtifactInput(
            stage=manifest.stage, key=manifest.key, path=path, digest=manifest.digest(path)
        )


@contextmanager
def explain_disk_errors(place: Path) -> Iterator[None]:
    """Turns "no space left" and "read-only" into one clear message about the store."""
    try:
        yield
    except Exception as error:
        number = _error_number(error)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left on the device that holds {place}",
                "free some space (`geb gc` lists what can go) or put the store elsewhere",
            ) from error
        if number in (errno.EROFS, errno.EACCES):
            raise UserError(
                f"{place} cannot be written: {os.strerror(number)}",
                "check the permissions of the store, or set `store` to a folder of yours",
            ) from error
        raise


def _error_number(error: Exception) -> int:
    """The errno behind an error, 0 for none; libraries in Rust (safetensors) put it in the text."""
    if isinstance(error, OSError):
        return error.errno or 0
    named = re.search(r"\(os error (\d+)\)", str(error))
    return int(named[1]) if named else 0


class Store:
    """A store on a local or shared file system.

    Args:
        root: The store's folder, as :meth:`open` checked it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def open(cls, location: str, *, create: bool = False) -> Store:
        """Opens the store at ``location``.

        Args:
            location: Folder of the store.
            create: Make an empty store where there is nothing yet.

        Raises:
            UserError: The location is a URL of a kind that is not supported.
            StoreError: There is no store, or it cannot be read. Nothing is ever recomputed because
                of it.
        """
        if "://" in location:
            raise UserError(
                f"store {location!r} is a URL", "set `store` to a folder (local or shared)"
            )
        root = Path(location).expanduser().absolute()
        marker = root / _MARKER
        if create and not marker.exists():
            if root.exists() and any(root.iterdir()):
                raise UserError(
                    f"{root} is not empty and holds no {_MARKER}: it is not a store",
                    "set `store` to a store or to an empty or new folder",
                )
            with explain_disk_errors(root):
                root.mkdir(parents=True, exist_ok=True)
                marker.write_text(json.dumps({"format": _FORMAT}))
        try:
            found = json.loads(marker.read_text())
        except OSError as error:
            raise StoreError(
                f"no store at {root}: {error.strerror}. Is the file system mounted?"
            ) from error
        if found.get("format") != _FORMAT:
            raise UserError(
                f"{root} is a store of format {found.get('format')}; this version reads {_FORMAT}",
                "use the version of geb that wrote it, or another store",
            )
        return cls(root)

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
        return Lease(self.root / "leases" / stage / key)

    def load(self, stage: str, key: str) -> Artifact | None:
        """Finds and checks an artifact.

        Sizes are compared always; a file whose modification time is not the one in the manifest is
        hashed as well.

        Returns:
            The artifact, or None when there is nothing under the key.

        Raises:
            StoreError: The store cannot be read.
            DamagedArtifactError: The artifact is not what its manifest says.
        """
        if not (self.root / _MARKER).exists():
            raise StoreError(f"the store at {self.root} is gone. Is the file system mounted?")
        path = self.artifact_path(stage, key)
        if not path.exists():
            return None
        manifest = _read_manifest(path)
        for name, record in manifest.files.items():
            _check_file(path / name, record, always_hash=False)
        return Artifact(path, manifest)

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
            DamagedArtifactError: A file is missing or differs.
        """
        for name, record in artifact.manifest.files.items():
            _check_file(artifact.path / name, record, always_hash=True)

    def set_aside(self, stage: str, key: str) -> Path:
        """Moves an artifact into quarantine and returns its new place."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = self.root / "quarantine" / f"{stage}-{key[:16]}-{stamp}-{uuid.uuid4().hex[:6]}"
        aside.parent.mkdir(exist_ok=True)
        self.artifact_path(stage, key).rename(aside)
        return aside

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
            return Artifact(target, _read_manifest(target))
        _fsync(target.parent)
        shutil.rmtree(self.work_path(manifest.stage, manifest.key), ignore_errors=True)
        return Artifact(target, manifest)

    def artifacts(self, stage: str | None = None) -> Iterator[tuple[str, str]]:
        """Yields (stage, key) of all artifacts, in order of their names."""
        for folder in sorted((self.root / "artifacts").glob(f"{stage or '*'}/*")):
            if not folder.name.startswith(".scratch-"):
                yield folder.parent.name, folder.name

    def sweep_scratch(self, stage: str, key: str) -> None:
        """Removes what dead attempts at a key left. Call it while holding the key's lease."""
        for stale in (self.root / "artifacts" / stage).glob(f".scratch-{key[:16]}-*"):
            shutil.rmtree(stale)


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


def _read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json((path / MANIFEST).read_text())
    except (FileNotFoundError, ValidationError, UnicodeDecodeError) as error:
        raise DamagedArtifactError(
            f"damaged artifact {path.parent.name}/{path.name[:12]}: its {MANIFEST} is missing or "
            "unreadable"
        ) from error


def _check_file(path: Path, record: FileRecord, *, always_hash: bool) -> None:
    try:
        stat = path.stat()
    except FileNotFoundError as error:
        raise DamagedArtifactError(f"damaged artifact: {path} is missing") from error
    if stat.st_size != record.size:
        raise DamagedArtifactError(
            f"damaged artifact: {path} has {stat.st_size} bytes, not {record.size}"
        )
    suspicious = always_hash or stat.st_mtime_ns != record.mtime_ns
    if suspicious and sha256_file(path) != record.sha256:
        raise DamagedArtifactError(f"damaged artifact: the content of {path} has changed")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
