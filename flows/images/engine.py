"""The Docker engine as images need it: what it has by a name, and its errors as messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from stages.contract.errors import GebError, UserError


def find_image(client: docker.DockerClient, name: str) -> Any:
    """The engine's image of a name; None where there is none."""
    try:
        return client.images.get(name)
    except ImageNotFound:
        return None


@contextmanager
def engine_errors_explained(doing: str) -> Iterator[None]:
    """Turns what the engine refuses, and an engine that is gone, into messages.

    Args:
        doing: Name of the request that the block makes, for messages.

    Raises:
        UserError: The engine refuses it.
        GebError: The engine fails, or does not answer any more.
    """
    try:
        yield
    except APIError as error:
        said = str(error.explanation or error).strip()
        if error.is_client_error():
            raise UserError(
                f"{doing}: the Docker engine refuses: {said}", "correct what it names"
            ) from error
        raise GebError(f"{doing}: the Docker engine fails: {said}") from error
    except DockerException as error:
        raise GebError(f"{doing}: {error}") from error
    except (RequestException, HTTPError) as error:
        raise GebError(
            f"{doing}: the Docker engine does not answer any more ({type(error).__name__}: {error})"
        ) from error
