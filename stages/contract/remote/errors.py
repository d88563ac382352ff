"""Errors of object storage in words: faults of the bucket, the credentials or the object."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from stages.contract.errors import GebError, StoreError, UserError
from stages.contract.remote.clients import Service

# Addresses of a cloud machine's own credentials, which obstore asks last.
_METADATA_SERVERS = ("169.254.169.254", "metadata.google.internal")
_REFUSED = re.compile(r"status code: 40[13] ")
_BEYOND_THE_END = re.compile(r"status code: 416 |Wanted range starting at")
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")


class ConflictError(GebError):
    """A conditional write met another content than it expected."""


@contextmanager
def errors_explained(bucket: str, service: Service) -> Iterator[None]:
    """Turns errors of obstore in the block into those that say what is wrong.

    Args:
        bucket: Name of the bucket.
        service: Its service.

    Raises:
        UserError: There is no such bucket, or its credentials are missing or refused.
        ConflictError: The condition of a write does not hold.
        FileNotFoundError: There is no such object, or it ends before what is read of it.
        StoreError: The bucket cannot be reached or used.
    """
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        raise _explained(error, bucket, service) from error


def _explained(error: Exception, bucket: str, service: Service) -> Exception:
    """The error that says what is wrong with the bucket or the object."""
    from obstore import exceptions as kinds

    text = str(error).partition("\n\nDebug source")[0]
    place = f"bucket {bucket!r} at {service.endpoint}"
    if _NO_BUCKET.search(text):
        return UserError(
            f"there is no {place}",
            f"create it, correct `store`, or set {service.endpoint_variables[-1]} to where it is",
        )
    if isinstance(error, kinds.AlreadyExistsError | kinds.PreconditionError):
        return ConflictError(text)
    if isinstance(error, FileNotFoundError) or _BEYOND_THE_END.search(text):
        return FileNotFoundError(text)
    if any(each in text for each in _METADATA_SERVERS):
        return UserError(f"no credentials for {place}", service.credentials)
    if _REFUSED.search(text):
        return UserError(
            f"{place} refuses these credentials ({text})",
            f"{service.credentials} of one who may list, read, write and delete in it",
        )
    return StoreError(
        f"{place} cannot be reached or used ({type(error).__name__}: {text}). Check that it is "
        f"up and that {service.endpoint_variables[-1]} and the region are right, then "
        "resume: what is done stays done"
    )
