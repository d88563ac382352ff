"""Calls of Prefect's API: keys of artifacts, and requests that wait for a server that is away."""

import functools
import re
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import httpx

P = ParamSpec("P")
R = TypeVar("R")

# A server takes up to this long to start again on a busy machine.
_OUTAGE_SECONDS = 120.0
_POLL_SECONDS = 1.0


def artifact_key(*parts: str) -> str:
    """A key as Prefect wants it, of lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]", "-", "-".join(parts).lower()).strip("-")


def survives_outage(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function that calls Prefect's API wait for a server that is being started again.

    Prefect's client does so only once it has connected, and each artifact makes a new client.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        deadline = time.monotonic() + _OUTAGE_SECONDS
        while True:
            try:
                return function(*args, **kwargs)
            except httpx.ConnectError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)

    return call
