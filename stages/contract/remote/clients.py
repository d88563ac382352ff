"""Object-storage clients for s3://, gs:// and az:// addresses, through ``obstore``.

Endpoint and credentials come from each service's usual environment and configuration files; nothing
of them is ever written anywhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stages.contract.errors import UserError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# How long a transfer goes on trying when the bucket does not answer; a run of hours should outlive
# a restart of the storage. Read at each use, so that a person can set it.
_PATIENCE = "GEB_STORE_PATIENCE_SECONDS"
_DEFAULT_PATIENCE_SECONDS = 60.0
# A request is signed once for all its retries, and S3 takes a signature for 15 minutes.
_LONGEST_PATIENCE_SECONDS = 600.0
_CONNECT_SECONDS = 5
# One part of a file has to be through by then.
_REQUEST_SECONDS = 180
# A lease that is renewed expires later.
_IMPATIENT_REQUEST_SECONDS = 30
_CREDENTIAL_SECONDS = 300


@dataclass(frozen=True)
class Service:
    """One kind of object storage.

    Attributes:
        endpoint: Address of the service, for messages and for telling equal bucket names apart.
        open: Makes a client from bucket, prefix and the client's common settings.
        credentials: Remedy where credentials are missing or refused.
        endpoint_variable: Setting that leads to another endpoint.
    """

    endpoint: Callable[[], str]
    open: Callable[[str, str | None, dict[str, Any]], ObjectStore]
    credentials: str
    endpoint_variable: str


def open_clients(scheme: str, bucket: str, prefix: str) -> tuple[ObjectStore, ObjectStore]:
    """Clients of a bucket's prefix: one that goes on trying, and one that gives up at once.

    They are the same ones as long as the environment stays the same.

    Args:
        scheme: Key of :data:`SERVICES`.
        bucket: Bucket, or container of an Azure storage account.
        prefix: Start of all object names; may be empty.

    Raises:
        UserError: ``obstore`` is not installed, or there are no credentials.
    """
    chosen = ("AWS_", "AZURE_", "GOOGLE_", _PATIENCE)
    environment = {name: value for name, value in os.environ.items() if name.startswith(chosen)}
    return _clients(scheme, bucket, prefix, tuple(sorted(environment.items())))


@functools.lru_cache(maxsize=32)
def _clients(
    scheme: str, bucket: str, prefix: str, _: tuple[tuple[str, str], ...]
) -> tuple[ObjectStore, ObjectStore]:
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        raise UserError(
            "a store in a bucket needs obstore, which is not installed",
            "pip install 'geb[bucket]', or set `store` to a folder",
        ) from error
    patience = float(os.environ.get(_PATIENCE, _DEFAULT_PATIENCE_SECONDS))
    retry_timeout = timedelta(seconds=min(patience, _LONGEST_PATIENCE_SECONDS))

    def open_one(max_retries: int, request_seconds: float) -> ObjectStore:
        settings = {
            "client_options": {
                "allow_http": SERVICES[scheme].endpoint().startswith("http://"),
                "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                "timeout": timedelta(seconds=request_seconds),
            },
            "retry_config": {"max_retries": max_retries, "retry_timeout": retry_timeout},
        }
        return SERVICES[scheme].open(bucket, prefix or None, settings)

    return open_one(1000, _REQUEST_SECONDS), open_one(1, _IMPATIENT_REQUEST_SECONDS)


def _first_set(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)


def _s3_endpoint() -> str:
    named = _first_set("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return named or "AWS S3 or the endpoint of the AWS profile"


def _open_s3(bucket: str, prefix: str | None, settings: dict[str, Any]) -> ObjectStore:
    # obstore reads the environment only; profiles, SSO and instance roles are botocore's to find.
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Store

    session = Session()
    try:
        profile = session.get_scoped_config()
        provider = Boto3CredentialProvider(session, ttl=timedelta(seconds=_CREDENTIAL_SECONDS))
    except (BotoCoreError, ValueError) as error:
        raise UserError(
            f"no credentials for bucket {bucket!r} at {_s3_endpoint()} ({error})",
            SERVICES["s3"].credentials,
        ) from error
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    config: Any = {"region": region}
    endpoint = _first_set("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or profile.get("endpoint_url")
    if endpoint:
        config["endpoint"] = endpoint
        settings["client_options"]["allow_http"] = endpoint.startswith("http://")
    return S3Store(bucket, prefix=prefix, config=config, credential_provider=provider, **settings)


def _gs_endpoint() -> str:
    return _first_set("GOOGLE_BASE_URL") or "https://storage.googleapis.com"


def _open_gs(bucket: str, prefix: str | None, settings: dict[str, Any]) -> ObjectStore:
    from obstore.store import GCSStore

    return GCSStore(bucket, prefix=prefix, **settings)


def _az_endpoint() -> str:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "<account>")
    named = _first_set("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    return named or f"https://{account}.blob.core.windows.net"


def _open_az(bucket: str, prefix: str | None, settings: dict[str, Any]) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore

    try:
        return AzureStore(bucket, prefix=prefix, **settings)
    except BaseError as error:
        raise UserError(
            f"container {bucket!r} cannot be opened: {str(error).partition(chr(10))[0]}",
            SERVICES["az"].credentials,
        ) from error


SERVICES: Mapping[str, Service] = {
    "s3": Service(
        _s3_endpoint,
        _open_s3,
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        "AWS_ENDPOINT_URL",
    ),
    "gs": Service(
        _gs_endpoint,
        _open_gs,
        "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or run "
        "`gcloud auth application-default login`",
        "GOOGLE_BASE_URL",
    ),
    "az": Service(
        _az_endpoint,
        _open_az,
        "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another Azure credential",
        "AZURE_STORAGE_ENDPOINT",
    ),
}
