"""Lines of stages in Prefect's log, and requests that wait for a server that is away."""

import functools
import logging
import re
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect.logging import get_run_logger

from flows.execution.observer import Observer, StepLines
from stages.contract.events import Event
from stages.contract.request import Request

P = ParamSpec("P")
R = TypeVar("R")

# A server takes up to this long to start again on a busy machine.
_OUTAGE_SECONDS = 120.0
_POLL_SECONDS = 1.0
# The server keeps each line in its database.
_PROGRESS_SECONDS = 30.0


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


class PrefectProgress(Observer):
    """Passes what one stage says, and its progress, on to Prefect's log.

    To be made inside the task or flow run that shows it. The log never waits for the server.
    """

    def __init__(self) -> None:
        self._lines = StepLines(_PROGRESS_SECONDS)
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()

    def stage_event(self, request: Request, event: Event) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        log = self._lines.log_of(event)
        if log is not None:
            getattr(self._logger, log.level)(log.message)
