"""Object-storage clients for s3://, gs:// and az:// addresses, through ``obstore``.

Endpoint and credentials come from each service's usual environment and configuration files; nothing
of them is ever written anywhere.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stages.contract.errors import UserError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Time for which a transfer tries again when the bucket does not answer; a run of hours should
# outlive a restart of the storage. Read at each use, so that a person can set it.
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
        endpoint_variables: Settings that lead to another endpoint, the strongest first.
        default_endpoint: The endpoint without them.
        credentials: Remedy where credentials are missing or refused.
    """

    endpoint_variables: tuple[str, ...]
    default_endpoint: str
    credentials: str

    @property
    def endpoint(self) -> str:
        """Address for messages, and for telling equal bucket names apart."""
        found = (os.environ.get(name) for name in self.endpoint_variables)
        return next((each for each in found if each), os.path.expandvars(self.default_endpoint))


SERVICES: Mapping[str, Service] = {
    "s3": Service(
        ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        "AWS S3 or the endpoint of the AWS profile",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    "gs": Service(
        ("GOOGLE_BASE_URL",),
        "https://storage.googleapis.com",
        "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or run "
        "`gcloud auth application-default login`",
    ),
    "az": Service(
        ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
        "https://${AZURE_STORAGE_ACCOUNT_NAME}.blob.core.windows.net",
        "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another Azure credential",
    ),
}


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
        from obstore import store
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise UserError(
            "a store in a bucket needs obstore, which is not installed",
            "pip install 'geb[bucket]', or set `store` to a folder",
        ) from error
    service = SERVICES[scheme]
    retry_timeout = timedelta(seconds=_patience_seconds())
    kind: Any = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[scheme]

    def open_one(max_retries: int, request_seconds: float) -> ObjectStore:
        client: ObjectStore = kind(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                "timeout": timedelta(seconds=request_seconds),
            },
            retry_config={"max_retries": max_retries, "retry_timeout": retry_timeout},
            **settings,
        )
        return client

    try:
        settings = _aws_settings() if scheme == "s3" else {}
        endpoint = settings.get("config", {}).get("endpoint") or service.endpoint
        return open_one(1000, _REQUEST_SECONDS), open_one(1, _IMPATIENT_REQUEST_SECONDS)
    except (BaseError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise UserError(
            f"no credentials for bucket {bucket!r} at {service.endpoint} ({said})",
            service.credentials,
        ) from error


def _patience_seconds() -> float:
    text = os.environ.get(_PATIENCE) or str(_DEFAULT_PATIENCE_SECONDS)
    try:
        patience = float(text)
    except ValueError:
        patience = math.nan
    if not patience >= 0:
        raise UserError(
            f"{_PATIENCE} is {text!r}, no number of seconds",
            f"set it to one ({_DEFAULT_PATIENCE_SECONDS:g} if unset), or unset it",
        )
    return min(patience, _LONGEST_PATIENCE_SECONDS)


def _aws_settings() -> dict[str, Any]:
    """Settings that obstore, which reads the environment only, leaves to botocore to find.

    Raises:
        ValueError: No credentials, in the environment, a profile, SSO or the machine's role.
    """
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    try:
        profile = session.get_scoped_config()
        provider = Boto3CredentialProvider(session, ttl=timedelta(seconds=_CREDENTIAL_SECONDS))
    except BotoCoreError as error:
        raise ValueError(str(error)) from error
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    named = [os.environ.get(name) for name in SERVICES["s3"].endpoint_variables]
    endpoint = next((each for each in (*named, profile.get("endpoint_url")) if each), None)
    return {
        "config": {"region": region} | ({"endpoint": endpoint} if endpoint else {}),
        "credential_provider": provider,
    }
