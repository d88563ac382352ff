"""Probes in containers, and what a test wants to know of the engine."""

from pathlib import Path
from typing import Any

import docker

from flows.pipeline.placement import DockerSettings, Execution
from flows.runners.docker.options import KEY_LABEL, STORE_LABEL
from flows.runners.docker.runner import DockerPlace
from flows.runners.runner import Runner
from stages.contract.events import Event
from stages.contract.request import Request
from stages.store.base import Store

PROBE_IMAGE = "geb-probe:test"


def settings(**changes: Any) -> DockerSettings:
    """Settings of the docker runner that know the probe's image."""
    return DockerSettings.model_validate({"images": {"probe": PROBE_IMAGE}} | changes)


def runner(grace_seconds: float = 30.0, **changes: Any) -> Runner:
    """A docker runner that knows the probe's image."""
    execution = Execution(docker=settings(**changes), grace_seconds=grace_seconds)
    return Runner(DockerPlace(execution), execution)


def run(request: Request, grace_seconds: float = 30.0, **changes: Any) -> list[Event]:
    """Runs one probe to its end and returns what it said."""
    heard: list[Event] = []
    runner(grace_seconds, **changes).run(request, heard.append)
    return heard


def left_of(client: docker.DockerClient, store: Store) -> list[str]:
    """Names of the containers of a store, running or not."""
    filters = {"label": f"{STORE_LABEL}={store.root}"}
    return [str(each.name) for each in client.containers.list(all=True, filters=filters)]


def container_of(client: docker.DockerClient, request: Request) -> dict[str, Any]:
    """Record of the one container that computes a request, from the engine."""
    filters = {"label": f"{KEY_LABEL}={request.key}"}
    [found] = client.containers.list(filters=filters)
    return dict(found.attrs)


def logs_of(store: Store, request: Request) -> str:
    """The logs of all attempts at a request."""
    folder: Path = store.log_path(request.stage, request.key)
    return "".join(log.read_text() for log in sorted(folder.glob("*.log")))
