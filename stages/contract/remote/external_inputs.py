"""External inputs: files from outside the store, kept in the bucket for hosts without them.

Layout below ``inputs/<digest>/`` of the store::

    files.json    which files it is, written last
    <sha256>      their contents
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from stages.contract.digests import files_of, sha256_file, sha256_tree
from stages.contract.errors import UserError
from stages.contract.file_locks import exclusive_lock
from stages.contract.manifest import FileRecord
from stages.contract.remote.bucket import Bucket
from stages.contract.remote.transfer import download_files, is_here, upload_files
from stages.contract.request import FileInput
from stages.contract.store import OnBytes

_LIST = "files.json"
# Object, what it must be, and where it goes.
_Wanted = tuple[str, FileRecord, Path]


class _Files(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Of the file or folder."""
    files: dict[str, FileRecord]
    """By paths below the folder; a file of its own has the path ``""``."""


class ExternalInputs:
    """Copies of external inputs in the store's bucket.

    Args:
        bucket: The store's bucket.
        root: Folder for them on this host.
        parts: Folder for what is under way, on the same file system.
    """

    def __init__(self, bucket: Bucket, root: Path, parts: Path) -> None:
        self._bucket = bucket
        self._root = root
        self._parts = parts

    def upload(self, source: FileInput, on_bytes: OnBytes | None = None) -> None:
        """Uploads a file or folder of this host that the bucket does not have.

        Raises:
            UserError: It is no longer what the request names.
        """
        folder = _folder(source)
        if self._bucket.get(f"{folder}/{_LIST}") is not None:
            return
        place = Path(source.location)
        paths = {each.relative_to(place).as_posix(): each for each in files_of(place)}
        if place.is_file():
            paths = {"": place}
        files = {name: _record(path) for name, path in paths.items()}
        if _digest(files) != source.digest:
            raise UserError(
                f"{place} has changed since the run looked at it", "start the run again"
            )
        contents = {files[name].sha256: path for name, path in paths.items()}
        uploads = [(path, f"{folder}/{digest}") for digest, path in contents.items()]
        upload_files(self._bucket, uploads, on_bytes)
        listed = _Files(name=place.name, files=files)
        self._bucket.put(f"{folder}/{_LIST}", listed.model_dump_json().encode())

    def download(self, source: FileInput, on_bytes: OnBytes | None = None) -> Path | None:
        """Brings a file or folder here and returns its place; None where nobody uploaded it.

        Raises:
            DamagedArtifactError: What came is not what was uploaded.
        """
        folder = _folder(source)
        found = self._bucket.get(f"{folder}/{_LIST}")
        if found is None:
            return None
        listed = _Files.model_validate_json(found.data)
        place = self._root / source.digest / listed.name
        # Shards that start together want the same files, and would write into the same parts.
        with exclusive_lock(self._parts / f"{source.digest}.guard"):
            lacking = [
                (f"{folder}/{record.sha256}", record, target)
                for name, record in listed.files.items()
                if not is_here(target := place / name if name else place, record)
            ]
            for together in _of_different_content(lacking):
                download_files(self._bucket, together, self._parts, on_bytes)
        return place


def _of_different_content(files: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Files that can come at the same time: those of equal content would be one unfinished file."""
    left = list(files)
    while left:
        together = {name: (name, record, target) for name, record, target in left}
        yield list(together.values())
        taken = {target for _, _, target in together.values()}
        left = [each for each in left if each[2] not in taken]


def _folder(source: FileInput) -> str:
    return f"inputs/{source.digest}"


def _record(path: Path) -> FileRecord:
    # The time of the upload: hosts only compare it with what they have downloaded.
    return FileRecord(size=path.stat().st_size, sha256=sha256_file(path), mtime_ns=time.time_ns())


def _digest(files: dict[str, FileRecord]) -> str:
    if set(files) == {""}:
        return files[""].sha256
    return sha256_tree({name: record.sha256 for name, record in files.items()})
