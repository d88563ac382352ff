"""Containers of stages: connect to the engine, start, read, find, stop, remove.

Whoever holds the key's lease in the store looks after a container. Containers of a store that this
process does not see are left alone.
"""

import contextlib
import json
import math
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import docker
import requests
import urllib3
from docker.constants import DEFAULT_UNIX_SOCKET
from docker.errors import APIError, DockerException

from flows.runners.attempt_log import left_log
from flows.runners.base import SUPERVISOR_SECONDS, Ending
from flows.runners.docker.options import GPUS_LABEL, KEY_LABEL, STAGE_LABEL, STORE_LABEL
from flows.runners.place import orchestrator_lease
from stages.contract.errors import StageFailedError, UserError
from stages.contract.request import Request


def connect(timeout_seconds: int = 120) -> docker.DockerClient:
    """Connects to the engine; UserError if none answers."""
    try:
        _knock()
        return docker.from_env(timeout=timeout_seconds)
    except (DockerException, OSError) as error:
        raise UserError(
            f"no Docker engine answers: {error}",
            "start it, allow this user to use its socket, or set DOCKER_HOST",
        ) from error


def _knock() -> None:
    """Connects to the engine's socket once: its client leaves one open that does not connect."""
    kind, _, path = (os.environ.get("DOCKER_HOST") or DEFAULT_UNIX_SOCKET).partition("://")
    if kind.endswith("unix"):
        with socket.socket(socket.AF_UNIX) as tried:
            try:
                tried.connect(path)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None


# For a stage that a dead orchestrator left, between SIGTERM and SIGKILL.
_REAP_SECONDS = 10.0
# A progress bar ends its lines with "\r" alone; split at the end of a chunk, "\r\n" is two ends.
_LINE_END = re.compile(rb"\r\n|\r|\n")
# Errors of the engine's client when the engine goes away.
_ENGINE_ERRORS = (
    APIError,
    UserError,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,
    struct.error,
    OSError,
)


class StageContainer:
    """A container of this process."""

    def __init__(self, client: docker.DockerClient, container: str) -> None:
        self.id = container
        self._client = client
        self._stdin: Any = None
        self.held = contextlib.ExitStack()
        """GPUs and a connection, until the container is removed."""
        self.num_nodes = 1

    @property
    def title(self) -> str:
        """Its name, as people use it."""
        return f"container {self.id[:12]}"

    def start(self, secrets: Mapping[str, str]) -> None:
        """Starts the container; from then on this process holds its stdin open.

        The supervisor expects secrets, environment variables, on stdin if there are any.
        """
        self._stdin = self._client.api.attach_socket(
            self.id, params={"stdin": 1, "stream": 1, "stdout": 0, "stderr": 0}
        )
        self._client.api.start(self.id)
        if secrets:
            # The socket below what the engine's client makes of it.
            stream = getattr(self._stdin, "_sock", self._stdin)
            stream.sendall(json.dumps(dict(secrets)).encode() + b"\n")

    def lines(self, stream: Literal["stdout", "stderr"]) -> Iterator[str]:
        """Yields the lines that the container printed and prints, until it ends.

        They come from the engine's log, not from a socket attached to the container: there the
        engine's client loses what comes before it has read the answer's head.
        """
        unread = b""
        # A new connection: two threads read.
        with contextlib.closing(connect()) as client, contextlib.suppress(*_ENGINE_ERRORS):
            chosen = {"stdout": stream == "stdout", "stderr": stream == "stderr"}
            for data in client.api.logs(self.id, stream=True, follow=True, **chosen):
                *lines, unread = _LINE_END.split(unread + data)
                for line in lines:
                    yield line.decode(errors="replace") + "\n"
        if unread:
            yield unread.decode(errors="replace") + "\n"

    def wait(self) -> Ending:
        """Waits for the end; StageFailedError if the engine went away, or the container did."""
        try:
            self._client.api.wait(self.id)
            state = self._client.api.inspect_container(self.id)["State"]
        except _ENGINE_ERRORS as error:
            raise StageFailedError(
                f"the Docker engine, or container {self.id[:12]}, went away while the stage "
                f"ran ({type(error).__name__}); it goes on from its last checkpoint when it is "
                "tried again"
            ) from error
        # The kernel may have killed a program that the stage itself got over.
        memory = state["OOMKilled"] and state["ExitCode"]
        return Ending("out_of_memory" if memory else "exited", state["ExitCode"])

    def close(self) -> None:
        """Removes the container, running or not."""
        if self._stdin is not None:
            self._stdin.close()
        # Without an engine there is nothing to remove; a reaper finds the container.
        with contextlib.suppress(*_ENGINE_ERRORS):
            self._client.api.remove_container(self.id, force=True, v=True)
        self._client.close()
        self.held.close()


def stop(container: str, grace_seconds: float) -> None:
    """Ends a container, from any thread, and returns when it has ended.

    The supervisor hears SIGTERM and gives the stage its grace period; the engine kills the rest.
    """
    # One that is gone has ended; without an engine there is nothing that could be done.
    with contextlib.suppress(*_ENGINE_ERRORS), contextlib.closing(connect()) as client:
        client.api.stop(container, timeout=math.ceil(grace_seconds + SUPERVISOR_SECONDS))


def gpus_in_use(client: docker.DockerClient) -> set[str]:
    """Ids of the GPUs that containers at work have."""
    at_work = ["running", "paused"]
    found = client.api.containers(filters={"label": GPUS_LABEL, "status": at_work})
    return {device for each in found for device in each["Labels"][GPUS_LABEL].split(",")}


def reap() -> list[str]:
    """Removes containers that dead orchestrators left; returns a line for each."""
    with contextlib.closing(connect()) as client:
        found = client.api.containers(all=True, filters={"label": KEY_LABEL})
        return [_remove(client, each) for each in found if _is_left(each["Labels"])]


def remove_containers_of(request: Request) -> None:
    """Removes all containers for a key, whose lease this process holds."""
    labels = [f"{KEY_LABEL}={request.key}", f"{STORE_LABEL}={request.store}"]
    with contextlib.closing(connect()) as client:
        for each in client.api.containers(all=True, filters={"label": labels}):
            _remove(client, each)


def _is_left(labels: Mapping[str, str]) -> bool:
    store = labels[STORE_LABEL]
    lease = orchestrator_lease(store, labels[STAGE_LABEL], labels[KEY_LABEL])
    return Path(store).is_dir() and lease.holder() is None


def _remove(client: docker.DockerClient, found: dict[str, Any]) -> str:
    # Another reaper may be as far as this one.
    with contextlib.suppress(APIError):
        stop(found["Id"], _REAP_SECONDS)
        # Its output since its orchestrator's death is nowhere else.
        labels = found["Labels"]
        store = Path(labels[STORE_LABEL])
        stage = labels[STAGE_LABEL]
        key = labels[KEY_LABEL]
        log = left_log(store, stage, key, found["Id"][:12])
        log.write_bytes(client.api.logs(found["Id"]))
        client.api.remove_container(found["Id"], force=True, v=True)
    return f"removed container {found['Names'][0].lstrip('/')}: its orchestrator is gone"
