"""Containers of stages: connect to the engine, follow, stop, remove."""

import contextlib
import math
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import docker
import urllib3
from docker.errors import DockerException
from docker.models.containers import Container

from flows.runners.attempt_log import whole_lines
from flows.runners.command_lines import SUPERVISOR_SECONDS
from flows.runners.ending import Ending
from flows.runners.place import PlaceAwayError, StageJob, ends_when
from stages.contract.errors import PreemptedError


def connect() -> docker.DockerClient:
    """Connects to the engine; PlaceAwayError if none answers."""
    try:
        return docker.from_env(timeout=120)
    except DockerException as error:
        raise PlaceAwayError(f"no Docker engine answers: {error}") from error


# Errors of the engine's client when the engine goes away. Its APIError is an OSError.
_ENGINE_ERRORS = (OSError, PlaceAwayError, urllib3.exceptions.HTTPError, struct.error)


class StageContainer:
    """A container of this process.

    ``held`` ends and removes the container; it has its stdin, its GPUs, and the connection to the
    engine.
    """

    def __init__(
        self, job: StageJob, container: Container, held: contextlib.ExitStack, grace_seconds: float
    ) -> None:
        self._job = job
        self._container = container
        self._held = held
        self._grace_seconds = grace_seconds
        self.title = f"container {container.short_id}"

    def follow(self) -> Ending:
        """See :class:`flows.runners.place.Work`."""
        end = partial(stop_container, self._container, self._grace_seconds)
        with ends_when(self._job.stopping, end):
            for line in self._lines():
                self._job.handle_line(line)
            return self._wait()

    def remove(self) -> None:
        """See :class:`flows.runners.place.Work`."""
        self._held.close()

    def _lines(self) -> Iterator[str]:
        """Yields the lines that the container printed and prints, until it ends.

        They come from the engine's log, not from a socket attached to the container: there the
        engine's client loses what comes before it has read the answer's head.
        """
        with contextlib.suppress(*_ENGINE_ERRORS):
            output: Any = self._container.logs(stream=True, follow=True)
            with contextlib.closing(output):
                yield from whole_lines(output)

    def _wait(self) -> Ending:
        """Waits for the end; PreemptedError if the engine went away, or the container did."""
        try:
            self._container.wait()
            self._container.reload()
        except _ENGINE_ERRORS as error:
            raise PreemptedError(
                f"the Docker engine, or {self.title}, went away while the stage ran "
                f"({type(error).__name__}); it goes on from its last checkpoint when it is tried "
                "again"
            ) from error
        state = self._container.attrs["State"]
        # The kernel may have killed a program that the stage itself got over.
        memory = state["OOMKilled"] and state["ExitCode"]
        return Ending("out_of_memory" if memory else "exited", state["ExitCode"])


def stop_container(container: Container, grace_seconds: float) -> None:
    """Ends a container, from any thread, and returns when it has ended.

    The supervisor hears SIGTERM and gives the stage its grace period; the engine kills the rest.
    """
    # One that is gone has ended; without an engine there is nothing that could be done. A new
    # connection: the engine's client serves one thread.
    with contextlib.suppress(*_ENGINE_ERRORS), contextlib.closing(connect()) as client:
        timeout = math.ceil(grace_seconds + SUPERVISOR_SECONDS)
        client.api.stop(str(container.id), timeout=timeout)


def remove_container(container: Container, grace_seconds: float) -> None:
    """Ends and removes a container, running or not."""
    stop_container(container, grace_seconds)
    # Without an engine there is nothing to remove; the next attempt finds the container.
    with contextlib.suppress(*_ENGINE_ERRORS):
        container.remove(force=True, v=True)
