"""Containers at work: those of a request that can be taken over, and the GPUs that they use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker

from flows.runners.docker.container import StageContainer
from flows.runners.docker.options import (
    ALIVE_LABEL,
    AT_WORK,
    DEATH_LABEL,
    GPUS_LABEL,
    KEY_LABEL,
    STORE_LABEL,
)
from stages.contract.file_locks import AliveLock
from stages.contract.request import Request


def running_containers(client: docker.DockerClient, request: Request) -> Iterator[tuple[str, Path]]:
    """Running containers for a key that may outlive their orchestrator, with their locks."""
    wanted = [
        f"{KEY_LABEL}={request.key}",
        f"{STORE_LABEL}={request.store}",
        f"{DEATH_LABEL}=keep",
    ]
    found: list[dict[str, Any]] = client.api.containers(
        filters={"label": wanted, "status": AT_WORK}
    )
    for each in found:
        yield each["Id"], Path(each["Labels"][ALIVE_LABEL])


def gpus_in_use(client: docker.DockerClient) -> set[str]:
    """Ids of the GPUs that containers at work have."""
    found = client.api.containers(filters={"label": GPUS_LABEL, "status": AT_WORK})
    return {device for each in found for device in each["Labels"][GPUS_LABEL].split(",")}


def take_over(client: docker.DockerClient, request: Request) -> StageContainer | None:
    """A running container that computes the request and whose orchestrator is dead, if any."""
    for found, path in running_containers(client, request):
        lock = AliveLock(path)
        if lock.take():
            return StageContainer(client, found, lock)
    return None
