"""A prefix of a bucket of S3-compatible object storage, through fsspec's ``s3fs``.

Endpoint and credentials come from the usual AWS environment and configuration files; nothing of
them is ever written anywhere.
"""

from __future__ import annotations

import copy
import email.utils
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from stages.contract.errors import GebError, StoreError, UserError

T = TypeVar("T")

PARALLEL_TRANSFERS = 8
# How long a transfer goes on trying when the bucket does not answer; a run of hours should outlive
# a restart of the storage. Read at each use, so that a person can set it.
_PATIENCE = "GEB_STORE_PATIENCE_SECONDS"
_DEFAULT_PATIENCE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 15.0
# Of a file that goes in several parts; more than twice as much does.
_PART_BYTES = 16 << 20
_PARALLEL_PARTS = 4
# The most that S3 deletes in one request.
_DELETED_AT_ONCE = 1000
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_REFUSED = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "403",
}
# A range beyond the end is content that is not there.
_NOT_THERE = {"NoSuchKey", "404", "InvalidRange", "416"}
# 409 is one of two conditional writes at the same time.
_CONFLICT = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}


class ConflictError(GebError):
    """A conditional write met another content than it expected."""


@dataclass(frozen=True)
class Found:
    """An object as read.

    Attributes:
        data: Its content.
        etag: Names this content in conditional writes.
        age_seconds: Time since it was written, by the clock of the storage alone.
    """

    data: bytes
    etag: str
    age_seconds: float


@dataclass(frozen=True)
class Entry:
    """An object as listed."""

    size: int
    etag: str
    modified: float


class Bucket:
    """Objects below one prefix of a bucket. Safe to use from several threads.

    Args:
        url: ``s3://bucket/prefix``.

    Raises:
        UserError: The URL is of another kind, or ``s3fs`` is not installed.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.username:
            raise UserError(
                f"store {url!r} is not supported",
                "set `store` to a folder or to s3://bucket/prefix (endpoint and credentials come "
                "from the AWS environment)",
            )
        self.name = parts.netloc
        self.prefix = parts.path.strip("/")
        self.url = f"s3://{self.name}/{self.prefix}".rstrip("/")
        self._fs = _file_system()
        self._is_patient = True

    @property
    def endpoint(self) -> str:
        """Where the bucket is asked for, as a person would name it."""
        named = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
        return next((each for each in named if each), "AWS S3 or the endpoint of the AWS profile")

    def get(self, name: str) -> Found | None:
        """Reads a small object; None when there is none."""

        def read() -> Found | None:
            try:
                answer = self._call("get_object", Key=self._key(name))
            except _MissingError:
                return None
            return Found(self._body(answer), answer["ETag"], _age(answer))

        return self._patiently(read)

    def get_all(self, names: Iterable[str]) -> dict[str, Found]:
        """Reads many small objects; those that are not there are left out."""
        wanted = list(names)
        with ThreadPoolExecutor(PARALLEL_TRANSFERS) as pool:
            found = pool.map(self.get, wanted)
            return {name: each for name, each in zip(wanted, found, strict=True) if each}

    def put(
        self, name: str, data: bytes, *, absent: bool = False, replaces: str | None = None
    ) -> str:
        """Writes a small object and returns its ETag.

        Args:
            name: The object.
            data: Its content.
            absent: Write only where there is no such object.
            replaces: Write only where the object has this ETag.

        Raises:
            ConflictError: The condition does not hold.
        """
        conditions = {"IfNoneMatch": "*"} if absent else {}
        if replaces is not None:
            conditions["IfMatch"] = replaces

        def write() -> str:
            try:
                answer = self._call("put_object", Key=self._key(name), Body=data, **conditions)
            except (ConflictError, _MissingError):
                # An answer that got lost on its way makes the retry conflict with our own write.
                now = self.get(name)
                if now is not None and now.data == data:
                    return now.etag
                raise ConflictError(f"{self.url}/{name} has been changed meanwhile") from None
            return str(answer["ETag"])

        return self._patiently(write)

    def list(self, folder: str = "", *, limit: int | None = None) -> dict[str, Entry]:
        """Objects below a folder, all or the first ``limit``, by names relative to it, in order."""
        start = self._key(f"{folder}/" if folder else "")

        def pages() -> Iterator[dict[str, Any]]:
            more: dict[str, Any] = {"MaxKeys": limit} if limit else {}
            while True:
                page = self._call("list_objects_v2", Prefix=start, **more)
                yield page
                if limit or not page.get("IsTruncated"):
                    return
                more = {"ContinuationToken": page["NextContinuationToken"]}

        def read() -> dict[str, Entry]:
            return {
                each["Key"].removeprefix(start): Entry(
                    each["Size"], each["ETag"], each["LastModified"].timestamp()
                )
                for page in pages()
                for each in page.get("Contents", ())
            }

        return self._patiently(read)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; those that are not there do not matter."""
        keys = [{"Key": self._key(name)} for name in names]
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            batch = {"Objects": keys[first : first + _DELETED_AT_ONCE], "Quiet": True}
            self._patiently(functools.partial(self._call, "delete_objects", Delete=batch))

    def upload(self, path: Path, name: str) -> None:
        """Uploads a file of any size."""
        target = f"{self.name}/{self._key(name)}"
        self._patiently(lambda: self._guarded(lambda: self._put_file(path, target)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of an object.

        Raises:
            FileNotFoundError: There is no such object.
        """

        def read() -> bytes:
            wanted = f"bytes={start}-{stop - 1}"
            try:
                return self._body(self._call("get_object", Key=self._key(name), Range=wanted))
            except _MissingError as error:
                raise FileNotFoundError(f"{self.url}/{name}") from error

        return self._patiently(read)

    def impatient(self) -> Bucket:
        """The same bucket, given up at once when it does not answer."""
        hurried = copy.copy(self)
        hurried._is_patient = False
        return hurried

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _put_file(self, path: Path, target: str) -> None:
        self._fs.put_file(str(path), target, chunksize=_PART_BYTES, max_concurrency=_PARALLEL_PARTS)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._guarded(lambda: self._fs.call_s3(method, Bucket=self.name, **arguments))

    def _body(self, answer: Any) -> bytes:
        from fsspec.asyn import sync

        data: bytes = self._guarded(lambda: sync(self._fs.loop, answer["Body"].read))
        return data

    def _guarded(self, act: Callable[[], T]) -> T:
        """Turns what s3fs and botocore raise into errors that say what is wrong."""
        from botocore.exceptions import BotoCoreError, NoCredentialsError, PartialCredentialsError

        try:
            return act()
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise UserError(
                f"no credentials for bucket {self.name!r} at {self.endpoint}", _CREDENTIALS
            ) from error
        except (OSError, BotoCoreError) as error:
            code = _code(error)
            if code in _CONFLICT:
                raise ConflictError(str(error)) from error
            if code in _NOT_THERE:
                raise _MissingError(str(error)) from error
            if code == "NoSuchBucket":
                raise UserError(
                    f"there is no bucket {self.name!r} at {self.endpoint}",
                    "create it, correct `store`, or set AWS_ENDPOINT_URL to where it is",
                ) from error
            if code in _REFUSED:
                raise UserError(
                    f"bucket {self.name!r} at {self.endpoint} refuses these credentials "
                    f"({code}: {error})",
                    f"{_CREDENTIALS} of one who may list, read, write and delete in it",
                ) from error
            raise _UnreachableError(
                f"bucket {self.name!r} at {self.endpoint} cannot be reached or used "
                f"({type(error).__name__}: {error}). Check that it is up and that "
                "AWS_ENDPOINT_URL and AWS_REGION are right, then resume: what is done stays done"
            ) from error

    def _patiently(self, act: Callable[[], T]) -> T:
        """Tries again, ever more slowly, while the bucket cannot be reached."""
        patience = float(os.environ.get(_PATIENCE, _DEFAULT_PATIENCE_SECONDS))
        deadline = time.monotonic() + (patience if self._is_patient else 0)
        pause = 0.5
        while True:
            try:
                return act()
            except _UnreachableError:
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class _UnreachableError(StoreError):
    """Another attempt may help."""


class _MissingError(GebError):
    """There is no such object."""


def _file_system() -> Any:
    """One client for all that is reached by the same endpoint and credentials."""
    found = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return _client(tuple(sorted(found.items())))


@functools.lru_cache(maxsize=8)
def _client(environment: tuple[tuple[str, str], ...]) -> Any:
    try:
        from s3fs import S3FileSystem
    except ImportError as error:
        raise UserError(
            "a store in a bucket needs s3fs, which is not installed",
            "pip install 'geb[s3]', or set `store` to a folder",
        ) from error
    # Listings must be what is there now, not what was there once.
    return S3FileSystem(
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={"connect_timeout": 5, "max_pool_connections": 4 * PARALLEL_TRANSFERS},
    )


def _code(error: BaseException) -> str:
    """The storage's own name of an error; s3fs keeps it in the cause."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


def _age(answer: Any) -> float:
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()
    return float(now - answer["LastModified"].timestamp())
