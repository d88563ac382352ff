"""Docker runner: each stage in a container of its own, under its supervisor.

The supervisor is the container's first process. Under ``on_orchestrator_death: stop`` it ends the
stage when stdin does, and stdin is held open by the orchestrator; under ``keep`` the stage goes on
and the next attempt at the same key takes its container over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence

import docker
from docker.errors import APIError

from flows.pipeline.placement import DockerSettings
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import OnEvent, log_once, supervised
from flows.runners.docker.container import (
    StageContainer,
    connect,
    gpus_in_use,
    reap,
    running_containers,
    stop,
    take_over,
    time_limit,
)
from flows.runners.docker.images import Images
from flows.runners.docker.options import (
    container_options,
    host_options,
    needs_network,
    user_for,
)
from flows.runners.local.gpu_locks import hold_gpus
from flows.runners.local.outputs import chown_outputs
from flows.runners.outcome import Ending
from flows.runners.place import PlaceRunner
from stages.contract.errors import StageFailedError, StoppedError, UserError
from stages.contract.file_locks import AliveLock, is_held
from stages.contract.local_store import LocalStore
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

    Args:
        settings: Images, mounts, limits.
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.

    Raises:
        UserError: No Docker engine answers.
    """

    name = "docker"

    def __init__(self, settings: DockerSettings, grace_seconds: float) -> None:
        self._settings = settings
        self._images = Images(settings)
        self._grace_seconds = grace_seconds
        for line in reap(keep_running=True):
            _log.warning(line)

    @contextlib.contextmanager
    def owning(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> Iterator[Callable[[], None]]:
        """See :class:`Place`: the lock of a container says who owns it."""
        yield lambda: None

    def find(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> StageContainer | None:
        """See :class:`Place`."""
        # A connection of its own: the engine's client serves one thread.
        client = connect()
        container = take_over(client, request)
        if container is None:
            client.close()
        return container

    def submit(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> StageContainer:
        """See :class:`Place`."""
        with contextlib.ExitStack() as stack:
            client = connect()
            stack.callback(client.close)
            devices = stack.enter_context(self._gpus(client, request, on_event, stopping))
            container = self._create(client, request, devices)
            try:
                self._start(container, request)
            except BaseException:
                container.close()
                raise
            container.hold(stack.pop_all())
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
        with time_limit(work.id, request.resources.timeout_seconds, self._grace_seconds) as overdue:
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

    def has_running(self, request: Request) -> bool:
        """See :class:`Place`."""
        with contextlib.closing(connect()) as client:
            return any(not is_held(lock) for _, lock in running_containers(client, request))

    @contextlib.contextmanager
    def _gpus(
        self,
        client: docker.DockerClient,
        request: Request,
        on_event: OnEvent,
        stopping: threading.Event,
    ) -> Iterator[tuple[str, ...]]:
        """Holds the GPUs that a new container gets."""
        say = log_once(on_event)
        number = request.resources.gpus
        with hold_gpus(number, waiting=say, stopping=stopping) as held:
            # A container that outlived its orchestrator has its GPUs and no lock on them.
            while taken := set(held.devices) & gpus_in_use(client):
                say(f"waiting for GPU {', '.join(sorted(taken))}: a container still uses it")
                if stopping.wait(_POLL_SECONDS):
                    raise StoppedError(f"{request.place}: stopped while waiting for a GPU")
            yield held.devices

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
        image, image_name = self._images.find(client, request)
        user = user_for(settings, image.attrs["Config"]["User"])
        chown_outputs(request, *_ids_of(user, request))
        secrets = ["--secrets"] if settings.secrets.get(request.stage) else []
        name = _name_for(request)
        lock_path = LocalStore.open(request.store).root / "containers" / name
        alive = AliveLock(lock_path)
        alive.take()
        try:
            options = container_options(
                request,
                settings,
                image=image_name,
                user=user,
                command=supervised(
                    "python",
                    self._grace_seconds,
                    *secrets,
                    program=[f"stages.{request.stage}", write_request(request)],
                ),
                alive=lock_path,
                devices=devices,
            )
            host = client.api.create_host_config(**host_options(request, settings, devices))
            made = client.api.create_container(image.id, name=name, host_config=host, **options)
        except BaseException as error:
            alive.free(remove=True)
            if isinstance(error, APIError):
                raise refused(request, error) from error
            raise
        return StageContainer(client, made["Id"], alive)

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


class DockerRunner(PlaceRunner[StageContainer]):
    """Runs each stage in a container; see :class:`DockerPlace`."""

    def __init__(self, settings: DockerSettings, grace_seconds: float = 30.0) -> None:
        super().__init__(DockerPlace(settings, grace_seconds))


def _ids_of(user: str, request: Request) -> tuple[int, int]:
    uid, _, gid = user.partition(":")
    if not (uid.isdecimal() and gid.isdecimal()):
        raise UserError(
            f"the image for stage {request.stage!r} runs as {user!r}, not as a user and group id",
            "set execution.docker.user, such as 1000:1000",
        )
    return int(uid), int(gid)


def _name_for(request: Request) -> str:
    place = re.sub(r"[^a-zA-Z0-9.-]+", "-", request.place)
    return f"geb-{request.run}-{place}-{request.key[:8]}-{uuid.uuid4().hex[:6]}"
