"""Events of a stage in Prefect: its log, and a progress artifact; outages of the server."""

import functools
import logging
import re
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from flows.execution.observer import Observer
from stages.contract.events import Event, Failure, Log, Metric, Progress
from stages.contract.request import Request

P = ParamSpec("P")
R = TypeVar("R")

# A server takes up to this long to start again on a busy machine.
_OUTAGE_SECONDS = 120.0
_POLL_SECONDS = 1.0
# A progress update is a request to the server of about 20 ms.
_PROGRESS_SECONDS = 2.0
_LOGGER = logging.getLogger(__name__)


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
    """Passes the events of one stage on to Prefect.

    To be made inside the task or flow run that shows them. Progress never waits for the server.
    """

    def __init__(self, run: str, step: str) -> None:
        self._bar = _ProgressBar(artifact_key(run, step))
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()

    def __exit__(self, *_: object) -> None:
        """Ends the bar's thread without waiting for it."""
        self._bar.close()

    def stage_event(self, request: Request, event: Event) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        match event:
            case Log(level=level, message=message):
                getattr(self._logger, level)(message)
            case Failure(message=message, remedy=remedy):
                self._logger.error("%s%s", message, f"\nremedy: {remedy}" if remedy else "")
            case Metric(step=step, values=values):
                shown = " ".join(f"{name}={value:.4g}" for name, value in values.items())
                self._logger.debug("step %d %s", step, shown)
            case Progress(done=done, total=total, unit=unit):
                self._bar.show(100.0 * done / max(total, 1), f"{done}/{total} {unit}")


class _ProgressBar:
    """A progress artifact, updated by a thread that drops all values but the latest.

    A server that is slow or gone delays the bar and never the stage.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        # Prefect reads off the context which task run an artifact belongs to.
        self._context = copy_context()
        self._latest = (0.0, "")
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, percent: float, text: str) -> None:
        """Makes this the next value to send."""
        self._latest = percent, text
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._context.run, args=(self._send,), name="progress", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Ends the thread after the latest value, without waiting for it."""
        self._closed.set()

    def _send(self) -> None:
        artifact: Any = None
        sent: tuple[float, str] | None = None
        is_last = False
        while not is_last:
            # Before the value is read: none comes after the end.
            is_last = self._closed.is_set()
            if (value := self._latest) != sent:
                sent = value
                try:
                    artifact = self._show(artifact, *value)
                except Exception as error:
                    _LOGGER.debug("cannot show progress: %s", error)
            self._closed.wait(_PROGRESS_SECONDS)

    def _show(self, artifact: Any, percent: float, text: str) -> Any:
        if artifact is None:
            return create_progress_artifact(percent, key=self._key, description=text)
        update_progress_artifact(artifact, progress=percent, description=text)
        return artifact
