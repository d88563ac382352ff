"""Docker runner: each stage in a new container, under its supervisor.

The supervisor is the container's first process. It ends the stage when stdin does, and stdin is
held open by the orchestrator.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import docker
from docker.errors import APIError
from docker.models.containers import Container

from flows.pipeline.placement import DockerSettings, Execution
from flows.runners.command_lines import stage_command
from flows.runners.docker.container import (
    StageContainer,
    connect,
    remove_container,
)
from flows.runners.docker.images import find_image
from flows.runners.docker.options import (
    GPUS_LABEL,
    KEY_LABEL,
    STORE_LABEL,
    container_options,
    needs_network,
)
from flows.runners.local.gpus import hold_gpus
from flows.runners.place import NoRoomError, StageJob, Work, chown_outputs, work_name
from stages.contract.errors import StageFailedError, UserError
from stages.contract.request import Request


class DockerPlace:
    """The Docker engine of this machine."""

    def __init__(self, execution: Execution) -> None:
        self._settings = execution.docker
        self._grace_seconds = execution.grace_seconds

    def find(self, job: StageJob) -> None:
        """See :class:`flows.runners.place.Place`: none goes on without its orchestrator."""
        labels = [f"{KEY_LABEL}={job.request.key}", f"{STORE_LABEL}={job.store.identity}"]
        with contextlib.closing(connect()) as client:
            left = client.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
            for container in left:
                remove_container(container, self._grace_seconds)

    def start(self, job: StageJob) -> Work:
        """See :class:`flows.runners.place.Place`."""
        request = job.request
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(contextlib.closing(connect()))
            gpus = stack.enter_context(hold_gpus(request.resources.gpus))
            if not gpus.keys().isdisjoint(_gpus_in_use(client)):
                # Its orchestrator was killed, and with it the lock.
                raise NoRoomError("a container still uses the GPU")
            try:
                container = self._create(client, job, tuple(gpus))
                stack.callback(remove_container, container, self._grace_seconds)
                stack.enter_context(_started(container, secrets_for(self._settings, request.stage)))
            except APIError as error:
                raise _refused(request, error) from error
            return StageContainer(job, container, stack.pop_all(), self._grace_seconds)

    def _create(
        self, client: docker.DockerClient, job: StageJob, devices: tuple[str, ...]
    ) -> Container:
        """Creates the container of a stage.

        Raises:
            UserError: The stage has no image, no network for what it reads, or no user.
        """
        request = job.request
        settings = self._settings
        if needs_network(request, settings):
            raise UserError(
                f"stage {request.stage!r} reads something of the hub and has no network",
                f"set execution.docker.network.{request.stage} to a Docker network (`bridge`), or "
                f"HF_HOME in execution.docker.environment.{request.stage} to a cache that holds it",
            )
        image, image_name = find_image(client, settings, request)
        orchestrator = f"{os.geteuid()}:{os.getegid()}"
        image_user = image.attrs["Config"]["User"]
        # The artifacts are then the orchestrator's; no stage is root.
        user = settings.user or (orchestrator if os.geteuid() else image_user)
        uid, _, gid = user.partition(":")
        if not (uid.isdecimal() and gid.isdecimal()):
            raise UserError(
                f"the image {image_name} runs as user {user!r}, not as a user and group id",
                "set execution.docker.user, such as 1000:1000",
            )
        chown_outputs(request, int(uid), int(gid))
        secrets = ["--secrets"] if settings.secrets.get(request.stage) else []
        command = stage_command(request, job.request_path, "python", self._grace_seconds, *secrets)
        options = container_options(
            request,
            job.store,
            settings,
            image=image_name,
            user=user,
            command=command,
            devices=devices,
        )
        return client.containers.create(image.id, name=work_name(request), **options)


def secrets_for(settings: DockerSettings, stage: str) -> dict[str, str]:
    """Values of a stage's secrets; UserError if the orchestrator's environment lacks one."""
    names = settings.secrets.get(stage, ())
    if missing := [name for name in names if name not in os.environ]:
        raise UserError(
            f"execution.docker.secrets.{stage} names {', '.join(missing)}, which the "
            "orchestrator's environment does not have",
            "set it there, or take the name out",
        )
    return {name: os.environ[name] for name in names}


def _gpus_in_use(client: docker.DockerClient) -> Iterator[str]:
    for container in client.containers.list(filters={"label": GPUS_LABEL}, ignore_removed=True):
        yield from container.labels[GPUS_LABEL].split(",")


@contextlib.contextmanager
def _started(container: Container, secrets: Mapping[str, str]) -> Iterator[None]:
    """Starts a container and holds its stdin open within the block.

    The supervisor expects secrets, environment variables, on stdin if there are any.
    """
    stdin: Any = container.attach_socket(params={"stdin": 1, "stream": 1, "stdout": 0, "stderr": 0})
    # The socket below what the engine's client makes of it, which leaves it open.
    stream = getattr(stdin, "_sock", stdin)
    with contextlib.closing(stream), contextlib.closing(stdin):
        container.start()
        if secrets:
            stream.sendall(json.dumps(dict(secrets)).encode() + b"\n")
        yield


def _refused(request: Request, error: APIError) -> UserError | StageFailedError:
    """The error for a container that the engine did not make or start."""
    reason = str(error.explanation or error)
    message = f"{request.title}: the Docker engine refuses the container: {reason}"
    if "could not select device driver" in reason:
        return UserError(
            message,
            "install the NVIDIA container toolkit on this machine, or set "
            f"resources.{request.stage}.gpus to 0",
        )
    if error.is_client_error():
        return UserError(message, "correct execution.docker, or what it names")
    return StageFailedError(message)
