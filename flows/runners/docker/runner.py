"""Docker runner: each stage in a new container, under its supervisor.

The supervisor is the container's first process. It ends the stage when stdin does, and stdin is
held open by the orchestrator.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import docker
from docker.errors import APIError

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import Ending, OnEvent, log_once, program_of, supervised, time_limit
from flows.runners.docker.container import (
    StageContainer,
    connect,
    gpus_in_use,
    reap,
    remove_containers_of,
    stop,
)
from flows.runners.docker.images import find_image
from flows.runners.docker.options import container_options, host_options, needs_network, user_for
from flows.runners.local.gpus import hold_gpus
from flows.runners.place import chown_outputs, work_name
from stages.contract.errors import StageFailedError, StoppedError, UserError
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


# Between two checks whether a GPU is free.
_POLL_SECONDS = 1.0
_log = logging.getLogger(__name__)


class DockerPlace:
    """The Docker engine of this machine. Constructing one removes containers of dead orchestrators.

    UserError if no Docker engine answers.
    """

    name = "docker"

    def __init__(self, execution: Execution) -> None:
        self._settings = execution.docker
        self._grace_seconds = execution.grace_seconds
        for line in reap():
            _log.warning(line)

    def find(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> StageContainer | None:
        """See :class:`Place`: no container goes on without its orchestrator."""
        remove_containers_of(request)
        return None

    def submit(
        self, request: Request, log: Path, on_event: OnEvent, stopping: threading.Event
    ) -> StageContainer:
        """See :class:`Place`."""
        with contextlib.ExitStack() as stack:
            # A new connection: the engine's client serves one thread.
            client = connect()
            stack.callback(client.close)
            say = log_once(on_event)
            number = request.resources.gpus
            gpus = stack.enter_context(hold_gpus(number, waiting=say, stopping=stopping))
            # The container of a killed orchestrator has its GPUs for a while, and no lock on them.
            while taken := set(gpus.devices) & gpus_in_use(client):
                say(f"waiting for GPU {', '.join(sorted(taken))}: a container still uses it")
                if stopping.wait(_POLL_SECONDS):
                    raise StoppedError(f"{request.place}: stopped while waiting for a GPU")
            container = self._create(client, request, gpus.devices)
            try:
                self._start(container, request)
            except BaseException:
                container.close()
                raise
            container.held = stack.pop_all()
        return container

    def follow(
        self,
        work: StageContainer,
        request: Request,
        logs: Sequence[AttemptLog],
        on_event: OnEvent,
        stopping: threading.Event,
        check_owner: Callable[[], None],
    ) -> list[Ending]:
        """See :class:`Place`."""
        [log] = logs
        limit = request.resources.timeout_seconds
        with time_limit(limit, lambda: stop(work.id, self._grace_seconds)) as overdue:
            reader = threading.Thread(target=log.write_all, args=(work.lines("stderr"),))
            reader.start()
            try:
                for line in work.lines("stdout"):
                    log.handle_line(line, on_event)
                reader.join()
            finally:
                # An interrupt leaves the reader to the end of the container.
                log.end()
            ending = work.wait()
        return [Ending("overdue", ending.code) if overdue.is_set() else ending]

    def end(self, works: Sequence[StageContainer]) -> None:
        """See :class:`Place`."""
        threads = [
            threading.Thread(target=stop, args=(each.id, self._grace_seconds)) for each in works
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self, work: StageContainer) -> None:
        """See :class:`Place`."""
        work.close()

    def _create(
        self, client: docker.DockerClient, request: Request, devices: tuple[str, ...]
    ) -> StageContainer:
        settings = self._settings
        if needs_network(request, settings):
            raise UserError(
                f"stage {request.stage!r} reads something of the hub and has no network",
                f"set execution.docker.network.{request.stage} to a Docker network (`bridge`), or "
                "execution.docker.model_cache to a folder that holds it",
            )
        image, image_name = find_image(client, settings, request)
        user = user_for(settings, image.attrs["Config"]["User"])
        chown_outputs(request, *_ids_of(user, request))
        secrets = ["--secrets"] if settings.secrets.get(request.stage) else []
        options = container_options(
            request,
            settings,
            image=image_name,
            user=user,
            command=supervised(
                "python",
                self._grace_seconds,
                *secrets,
                program=program_of(request, write_request(request)),
            ),
            devices=devices,
        )
        host = client.api.create_host_config(**host_options(request, settings, devices))
        try:
            made = client.api.create_container(
                image.id, name=work_name(request), host_config=host, **options
            )
        except APIError as error:
            raise refused(request, error) from error
        return StageContainer(client, made["Id"])

    def _start(self, container: StageContainer, request: Request) -> None:
        names = self._settings.secrets.get(request.stage, ())
        if missing := [name for name in names if name not in os.environ]:
            raise UserError(
                f"execution.docker.secrets.{request.stage} names {', '.join(missing)}, which the "
                "orchestrator's environment does not have",
                "set it there, or take the name out",
            )
        try:
            container.start({name: os.environ[name] for name in names})
        except APIError as error:
            raise refused(request, error) from error


def _ids_of(user: str, request: Request) -> tuple[int, int]:
    uid, _, gid = user.partition(":")
    if not (uid.isdecimal() and gid.isdecimal()):
        raise UserError(
            f"the image for stage {request.stage!r} runs as {user!r}, not as a user and group id",
            "set execution.docker.user, such as 1000:1000",
        )
    return int(uid), int(gid)
