"""Objects below one prefix of a bucket: conditional writes, listings, transfers, clear errors."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stages.contract.errors import StoreError, UserError
from stages.contract.remote.clients import SERVICES, open_clients
from stages.contract.remote.errors import ConflictError, errors_explained

PARALLEL_TRANSFERS = 8
# Of a file that goes in several parts: any larger one does.
_PART_BYTES = 16 << 20
_PARALLEL_PARTS = 4
_CLOCK = "clock"


@dataclass(frozen=True)
class Version:
    """One content of an object, for conditional writes.

    Attributes:
        etag: In quotes, as HTTP has it. Equal contents may have different ones.
        generation: Number of the write, which Google Cloud Storage's conditions are on.
    """

    etag: str
    generation: str | None = None

    @classmethod
    def of(cls, facts: Any) -> Version:
        """Version of an object, from its metadata in obstore."""
        return cls(_quoted(facts["e_tag"]), facts["version"])

    def condition(self) -> dict[str, str]:
        """Condition for obstore under which a write replaces only this content."""
        condition = {"e_tag": self.etag}
        return condition | ({"version": self.generation} if self.generation else {})


@dataclass(frozen=True)
class Found:
    """An object as read.

    Attributes:
        data: Its content.
        version: Names this content in conditional writes.
        modified: Time of its last write by the storage's clock, in seconds since 1970.
    """

    data: bytes
    version: Version
    modified: float


@dataclass(frozen=True)
class Entry:
    """An object as listed."""

    size: int
    etag: str
    modified: float


class Bucket:
    """Objects below one prefix of a bucket. Safe to use from several threads.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.

    Raises:
        UserError: The URL is of another kind, ``obstore`` is not installed, or there are no
            credentials.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SERVICES or not parts.netloc or parts.query or parts.username:
            raise UserError(
                f"store {url!r} is not supported",
                "set `store` to a folder or to s3://bucket/prefix, gs://bucket/prefix or "
                "az://container/prefix (endpoint and credentials come from the environment)",
            )
        self.name = parts.netloc
        self.prefix = parts.path.strip("/")
        self.url = f"{parts.scheme}://{self.name}/{self.prefix}".rstrip("/")
        self._service = SERVICES[parts.scheme]
        self._errors_explained = partial(errors_explained, self.name, self._service)
        self._client, self._impatient_client = open_clients(parts.scheme, self.name, self.prefix)
        self._clock_offset: float | None = None

    @property
    def endpoint(self) -> str:
        """Address of the service, for a person."""
        return self._service.endpoint

    def get(self, name: str) -> Found | None:
        """Reads a small object; None when there is none."""
        try:
            with self._errors_explained():
                answer = self._client.get(name)
                modified = answer.meta["last_modified"].timestamp()
                return Found(bytes(answer.bytes()), Version.of(answer.meta), modified)
        except FileNotFoundError:
            return None

    def get_all(self, names: Iterable[str]) -> dict[str, Found]:
        """Reads many small objects; those that are not there are left out."""
        wanted = list(names)
        with ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool:
            found = pool.map(self.get, wanted)
            return {name: each for name, each in zip(wanted, found, strict=True) if each}

    def put(
        self, name: str, data: bytes, *, absent: bool = False, replaces: Version | None = None
    ) -> Version:
        """Writes a small object and returns its version.

        Args:
            name: The object.
            data: Its content.
            absent: Write only where there is no such object.
            replaces: Write only where the object has this version.

        Raises:
            ConflictError: The condition does not hold.
        """
        mode: Any = "create" if absent else replaces.condition() if replaces else "overwrite"
        try:
            return self._put(name, data, mode)
        except (ConflictError, StoreError) as error:
            if mode == "overwrite":
                raise
            # An answer may get lost on its way after the write was done. obstore repeats only
            # unconditional writes then, and a repeated one would conflict with itself.
            now = self.get(name)
            if now is not None and now.data == data:
                return now.version
            if isinstance(error, ConflictError):
                raise ConflictError(f"{self.url}/{name} has been changed meanwhile") from None
        return self._put(name, data, mode)

    def _put(self, name: str, data: bytes, mode: Any) -> Version:
        with self._errors_explained():
            return Version.of(self._client.put(name, data, mode=mode, use_multipart=False))

    def list(self, folder: str = "", *, limit: int | None = None) -> dict[str, Entry]:
        """Objects below a folder, by names relative to it, in order.

        Args:
            folder: The folder; the whole prefix if empty.
            limit: Stop after some objects, this many or more.
        """
        with self._errors_explained():
            pages = self._client.list(folder or None, chunk_size=limit or 1000)
            found = next(iter(pages), []) if limit else pages.collect()
        start = f"{folder}/" if folder else ""
        return {
            each["path"].removeprefix(start): Entry(
                each["size"], _quoted(each["e_tag"]), each["last_modified"].timestamp()
            )
            for each in sorted(found, key=lambda each: each["path"])
        }

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; those that are not there do not matter."""
        wanted = list(names)
        try:
            with self._errors_explained():
                self._client.delete(wanted)
        except FileNotFoundError:
            # Azure ends at the first that is not there.
            for name in wanted:
                with contextlib.suppress(FileNotFoundError), self._errors_explained():
                    self._client.delete(name)

    def upload(self, path: Path, name: str) -> None:
        """Uploads a file of any size."""
        with self._errors_explained():
            self._client.put(name, path, chunk_size=_PART_BYTES, max_concurrency=_PARALLEL_PARTS)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of an object.

        Raises:
            FileNotFoundError: There is no such object, or it ends before ``start``.
        """
        with self._errors_explained():
            return bytes(self._client.get_range(name, start=start, end=stop))

    def now(self) -> float:
        """Time by the storage's clock, in seconds since 1970; that of a host may be wrong."""
        if self._clock_offset is None:
            # The only clock that obstore shows is the time of the last write.
            self.put(_CLOCK, b"")
            found = self.get(_CLOCK)
            assert found is not None
            self._clock_offset = found.modified - time.monotonic()
        return time.monotonic() + self._clock_offset

    def impatient(self) -> Bucket:
        """The same bucket, given up at once when it does not answer."""
        impatient = copy.copy(self)
        impatient._client = self._impatient_client
        return impatient


def _quoted(etag: str | None) -> str:
    """An ETag as HTTP has it; Azure's listings leave the quotes out."""
    return etag if etag and etag.endswith('"') else f'"{etag or ""}"'
