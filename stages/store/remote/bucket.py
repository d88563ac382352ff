"""Objects below one prefix of a bucket, through ``obstore``: s3://, gs:// and az:// addresses.

Endpoint and credentials come from each service's usual environment and configuration files; they
are never written anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from stages.contract.errors import ConflictError, DamagedArtifactError, StoreError, UserError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# A file larger than a part goes in several.
_PART_BYTES = 16 << 20
_PARALLEL_PARTS = 4
_LONGEST_PAUSE_SECONDS = 5.0
PATIENCE_VARIABLE = "GEB_STORE_PATIENCE_SECONDS"
"""Environment variable: how long a request is made again, so that runs outlive a restart of the
storage."""
_PATIENCE_SECONDS = 60.0
_CONNECT_SECONDS = 5
# One part of a file has to be through by then.
_REQUEST_SECONDS = 180
_CREDENTIAL_SECONDS = 300

# Addresses of a cloud machine's own credentials, which obstore asks last.
_METADATA_SERVERS = ("169.254.169.254", "metadata.google.internal")
_REFUSED = re.compile(r"status code: 40[13] ")
_BEYOND_THE_END = re.compile(r"status code: 416 |Wanted range starting at")
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class _Service(NamedTuple):
    """One kind of object storage."""

    endpoint_variable: str
    """Environment variable of another endpoint."""
    default_endpoint: str
    credentials: str
    """Remedy if credentials are missing or refused."""


_SERVICES: Mapping[str, _Service] = {
    "s3": _Service(
        "AWS_ENDPOINT_URL",
        "AWS S3",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    "gs": _Service(
        "GOOGLE_BASE_URL",
        "https://storage.googleapis.com",
        "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or run "
        "`gcloud auth application-default login`",
    ),
    "az": _Service(
        "AZURE_STORAGE_ENDPOINT",
        "https://${AZURE_STORAGE_ACCOUNT_NAME}.blob.core.windows.net",
        "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another Azure credential",
    ),
}


class Entry(NamedTuple):
    """One content of an object, as listed or read."""

    size: int
    etag: str
    """Identifies the write: equal contents may have different ones."""
    modified: float
    """Time of the write by the storage's clock, in seconds since the epoch."""
    generation: str | None
    """Number of the write, which Google Cloud Storage's conditions are on; not listed."""
    data: bytes = b""
    """The content, if it was read."""

    @classmethod
    def of(cls, facts: Any, data: bytes = b"") -> Entry:
        """Entry of an object, from its metadata in obstore."""
        # Azure's listings leave the quotes out that HTTP has.
        etag = f'"{(facts["e_tag"] or "").strip(chr(34))}"'
        return cls(facts["size"], etag, facts["last_modified"].timestamp(), facts["version"], data)


class Bucket:
    """Objects below one prefix of a bucket. Safe to use from several threads.

    Each request that the bucket does not answer, or answers with a part of it, is made again for
    ``GEB_STORE_PATIENCE_SECONDS``.

    Raises:
        UserError: The URL is of another kind, ``obstore`` is not installed, or there are no
            credentials.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _SERVICES or not parts.netloc or parts.query or parts.username:
            raise UserError(
                f"store {url!r} is not supported",
                "set `store` to a folder or to s3://bucket/prefix, gs://bucket/prefix or "
                "az://container/prefix (endpoint and credentials come from the environment)",
            )
        self.name = parts.netloc
        self.prefix = parts.path.strip("/")
        self.url = f"{parts.scheme}://{self.name}/{self.prefix}".rstrip("/")
        self._service = _SERVICES[parts.scheme]
        # For messages, and for telling equal bucket names apart.
        default = os.path.expandvars(self._service.default_endpoint)
        self.endpoint = os.environ.get(self._service.endpoint_variable, default)
        self._patience = float(os.environ.get(PATIENCE_VARIABLE, _PATIENCE_SECONDS))
        self._client = self._connect()

    def _connect(self) -> ObjectStore:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise UserError(
                "a store in a bucket needs obstore, which is not installed",
                "pip install 'geb[bucket]', or set `store` to a folder",
            ) from error
        try:
            settings = (
                _aws_settings(frozenset(os.environ.items()))
                if self._service is _SERVICES["s3"]
                else {}
            )
            return from_url(
                self.url,
                client_options={
                    "allow_http": self.endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                    "timeout": timedelta(seconds=_REQUEST_SECONDS),
                },
                # For a part of a large file; a whole request is made again by the bucket.
                retry_config={"max_retries": 3},
                **settings,
            )
        except (BaseError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"no credentials for bucket {self.name!r} at {self.endpoint} ({reason})",
                self._service.credentials,
            ) from error

    def get(self, name: str) -> Entry | None:
        """Reads a small object; None when there is none."""

        def read() -> Entry:
            answer = self._client.get(name)
            return Entry.of(answer.meta, bytes(answer.bytes()))

        try:
            return self._ask(read)
        except FileNotFoundError:
            return None

    def read(self, name: str, kind: type[M]) -> M | None:
        """Reads a JSON record; None if there is none, DamagedArtifactError if it is another."""
        entry = self.get(name)
        try:
            return kind.model_validate_json(entry.data) if entry else None
        except ValidationError as error:
            raise DamagedArtifactError(
                f"damaged artifact: {self.url}/{name} is unreadable"
            ) from error

    def put(
        self, name: str, data: bytes, *, absent: bool = False, replaces: Entry | None = None
    ) -> str:
        """Writes a small object and returns its ETag.

        It is written if it is ``absent``, or if it ``replaces`` one, or else in any case.
        ConflictError if the condition does not hold.
        """
        mode: Any = "create" if absent else "overwrite"
        if replaces is not None:
            mode = {"e_tag": replaces.etag}
            if replaces.generation:
                mode["version"] = replaces.generation
        try:
            put = self._ask(lambda: self._client.put(name, data, mode=mode, use_multipart=False))
            return put["e_tag"] or ""
        except ConflictError:
            # The write whose answer got lost on its way was done, and the next one met it.
            now = self.get(name)
            if now is None or now.data != data:
                raise ConflictError(
                    f"{self.url}/{name} has been changed meanwhile; try again"
                ) from None
            return now.etag

    def list(self, folder: str = "") -> dict[str, Entry]:
        """Objects below a folder (the whole prefix if empty), by names relative to it, in order."""
        facts = self._ask(lambda: self._client.list(folder or None).collect())
        start = f"{folder}/" if folder else ""
        return {
            object_facts["path"].removeprefix(start): Entry.of(object_facts)
            for object_facts in sorted(facts, key=itemgetter("path"))
        }

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; missing ones do not matter."""
        chosen = list(names)
        try:
            self._ask(lambda: self._client.delete(chosen))
        except FileNotFoundError:
            # Azure ends at the first that is not there.
            for name in chosen:
                with contextlib.suppress(FileNotFoundError):
                    self._ask(functools.partial(self._client.delete, name))

    def rename(self, name: str, target: str) -> None:
        """Moves an object within the bucket; one that is gone does not matter."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self._client.rename(name, target))

    def upload(self, path: Path, name: str) -> None:
        """Uploads a file of any size."""
        self._ask(
            lambda: self._client.put(
                name, path, chunk_size=_PART_BYTES, max_concurrency=_PARALLEL_PARTS
            )
        )

    def stream(self, name: str, size: int) -> Iterator[bytes]:
        """Content of an object of a size, in order.

        Raises:
            FileNotFoundError: The object is missing or shorter.
        """
        for start in range(0, size, _PART_BYTES):
            stop = min(start + _PART_BYTES, size)
            yield self._ask(functools.partial(self._read_range, name, start, stop))

    def _read_range(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self._client.get_range(name, start=start, end=stop))

    def _ask(self, request: Callable[[], T]) -> T:
        """Makes a request, again and again if the bucket does not answer it."""
        from obstore.exceptions import BaseError

        deadline = time.monotonic() + self._patience
        pause = 0.1
        while True:
            try:
                return request()
            except (BaseError, FileNotFoundError) as error:
                explained = self._explained(error)
                # Nothing else may pass when the request is made again.
                if type(explained) is not StoreError or time.monotonic() + pause > deadline:
                    raise explained from error
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _explained(self, error: Exception) -> Exception:
        """The error that says what is wrong with the bucket, the credentials or the object."""
        from obstore import exceptions as kinds

        text = str(error).partition("\n\nDebug source")[0]
        place = f"bucket {self.name!r} at {self.endpoint}"
        variable = self._service.endpoint_variable
        credentials = self._service.credentials
        if _NO_BUCKET.search(text):
            return UserError(
                f"there is no {place}",
                f"create it, correct `store`, or set {variable} to where it is",
            )
        if isinstance(error, kinds.AlreadyExistsError | kinds.PreconditionError):
            return ConflictError(text)
        if isinstance(error, FileNotFoundError) or _BEYOND_THE_END.search(text):
            return FileNotFoundError(text)
        if any(server in text for server in _METADATA_SERVERS):
            return UserError(f"no credentials for {place}", credentials)
        if _REFUSED.search(text):
            return UserError(
                f"{place} refuses these credentials ({text})",
                f"{credentials} of one who may list, read, write and delete in it",
            )
        return StoreError(
            f"{place} cannot be reached or used ({type(error).__name__}: {text}). Check that it is "
            f"up and that {variable} and the region are right, then resume: finished steps are kept"
        )


@functools.lru_cache
def _aws_settings(_: frozenset[tuple[str, str]]) -> dict[str, Any]:
    """Region and credentials by botocore: obstore itself reads the environment only.

    Found once in an environment: a role's or SSO's credentials are requests.

    Raises:
        ValueError: No credentials, in the environment, a profile, SSO or the machine's role.
    """
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    try:
        provider = Boto3CredentialProvider(session, ttl=timedelta(seconds=_CREDENTIAL_SECONDS))
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    except BotoCoreError as error:
        raise ValueError(str(error)) from error
    return {"region": region or "us-east-1", "credential_provider": provider}
