"""The Docker engine of this machine, or of the one that DOCKER_HOST names."""

from __future__ import annotations

import docker
from docker.errors import DockerException

from stages.contract.errors import UserError


def connect(timeout_seconds: int = 120) -> docker.DockerClient:
    """Connects to the engine.

    Args:
        timeout_seconds: Longest wait for an answer to one request.

    Raises:
        UserError: No engine answers.
    """
    try:
        return docker.from_env(timeout=timeout_seconds)
    except DockerException as error:
        raise UserError(
            f"no Docker engine answers: {error}",
            "start it, allow this user to use its socket, or set DOCKER_HOST",
        ) from error
