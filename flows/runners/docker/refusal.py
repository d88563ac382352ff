"""Errors of the Docker engine when a container is made or started, with their remedies."""

from __future__ import annotations

from docker.errors import APIError

from stages.contract.errors import StageFailedError, UserError
from stages.contract.request import Request


def refused(request: Request, error: APIError) -> UserError | StageFailedError:
    """The error for a container that the engine did not make or start."""
    where = request.place
    said = str(error.explanation or error)
    if "could not select device driver" in said:
        return UserError(
            f"{where}: the Docker engine offers no GPUs ({said.strip()})",
            "install the NVIDIA container toolkit on this machine, or set "
            f"resources.{request.stage}.gpus to 0",
        )
    if error.is_client_error():
        return UserError(
            f"{where}: the Docker engine refuses the container: {said}",
            "correct execution.docker, or what it names",
        )
    return StageFailedError(f"{where}: the Docker engine could not start the container: {said}")
