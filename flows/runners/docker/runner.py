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
from collections.abc import Iterator

import docker
from docker.errors import APIError

from flows.pipeline.placement import DockerSettings
from flows.runners.attempt_log import AttemptLog, new_log, write_request
from flows.runners.base import FailureTail, OnEvent, log_once, supervised
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
from flows.runners.docker.refusal import refused
from flows.runners.local.gpu_locks import hold_gpus
from flows.runners.local.outputs import chown_outputs, remove_empty_work
from flows.runners.outcome import raise_for
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Log
from stages.contract.file_locks import AliveLock, is_held
from stages.contract.local_store import LocalStore
from stages.contract.request import Request

# Between two checks whether a GPU is free.
_POLL_SECONDS = 1.0
_log = logging.getLogger(__name__)


class DockerRunner:
    """Runs each stage in a container. Constructing one removes containers of dead orchestrators.

    Args:
        settings: Images, mounts, limits.
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.

    Raises:
        UserError: No Docker engine answers.
    """

    name = "docker"

    def __init__(self, settings: DockerSettings, grace_seconds: float = 30.0) -> None:
        self._settings = settings
        self._images = Images(settings)
        self._grace_seconds = grace_seconds
        self._live: set[str] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        for line in reap(keep_running=True):
            _log.warning(line)

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        log = new_log(request)
        tail = FailureTail()
        with (
            log.open("w", encoding="utf-8") as file,
            self._stage_container(request, on_event) as container,
        ):
            log_file = AttemptLog(file, tail)
            limit = request.resources.timeout_seconds
            with time_limit(container.id, limit, self._grace_seconds) as overdue:
                reader = threading.Thread(
                    target=log_file.write_all, args=(container.lines("stderr"),)
                )
                reader.start()
                try:
                    for line in container.lines("stdout"):
                        log_file.handle_line(line, on_event)
                    reader.join()
                finally:
                    # An interrupt leaves the reader to the end of the container.
                    log_file.end()
                ending = container.wait()
            log_file.warn_if_incomplete(log, on_event)
        remove_empty_work(request)
        if overdue.is_set():
            tail.raise_overdue(request, str(log))
        raise_for([ending], [tail], request, stopped=self._stopping.is_set(), logs=[log])

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._lock:
            self._stopping.set()
            live = list(self._live)
        threads = [threading.Thread(target=stop, args=(each, self._grace_seconds)) for each in live]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        with contextlib.closing(connect()) as client:
            return any(not is_held(lock) for _, lock in running_containers(client, request))

    @contextlib.contextmanager
    def _stage_container(self, request: Request, on_event: OnEvent) -> Iterator[StageContainer]:
        """A running container that computes the request: a dead orchestrator's, or a new one."""
        with contextlib.ExitStack() as stack:
            # A connection of its own: the engine's client serves one thread.
            client = stack.enter_context(contextlib.closing(connect()))
            container = take_over(client, request)
            new = container is None
            if container is None:
                devices = stack.enter_context(self._gpus(client, request, on_event))
                container = self._create(client, request, devices)
            else:
                taken = f"container {container.id[:12]}"
                on_event(Log(message=f"taking over {taken}, which computes this already"))
            stack.enter_context(container)
            with self._lock:
                self._live.add(container.id)
            try:
                if new:
                    self._start(container, request)
                if self._stopping.is_set():
                    stop(container.id, self._grace_seconds)
                yield container
            finally:
                with self._lock:
                    self._live.discard(container.id)

    @contextlib.contextmanager
    def _gpus(
        self, client: docker.DockerClient, request: Request, on_event: OnEvent
    ) -> Iterator[tuple[str, ...]]:
        """Holds the GPUs that a new container gets."""
        say = log_once(on_event)
        number = request.resources.gpus
        with hold_gpus(number, waiting=say, stopping=self._stopping) as held:
            # A container that outlived its orchestrator has its GPUs and no lock on them.
            while taken := set(held.devices) & gpus_in_use(client):
                say(f"waiting for GPU {', '.join(sorted(taken))}: a container still uses it")
                if self._stopping.wait(_POLL_SECONDS):
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
