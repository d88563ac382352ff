"""Runner ``skypilot``: each stage a managed job of SkyPilot, on a machine of whichever cloud.

The machine shares nothing with the orchestrator: the store is in a bucket, and the stage fetches
its request and inputs and sends its results by itself. `sky` does the rest: it finds a machine,
starts the image, and finds another one when a spot machine is taken away.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from flows.images.table import images_named
from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import (
    Ending,
    OnEvent,
    PlaceNotice,
    thread_variables,
)
from flows.runners.place import (
    KEY_CHARACTERS,
    PlaceAwayError,
    fetching_variables,
    node_commands,
    work_name,
)
from stages.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, UserError
from stages.contract.params import Settings
from stages.contract.request import Request
from stages.store.base import Store
from stages.store.opening import open_store

_CACHE = "/tmp/geb-cache"
# What `sky jobs logs` puts before a line of the job: `(name, pid=1234) `.
_PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\) ")
# Exit codes of `sky jobs logs`.
_SUCCEEDED, _FAILED, _CANCELLED = 0, 100, 103


class SkySettings(Settings):
    """Fields of `execution.runner_settings` with `runner: skypilot`."""

    registry: str = ""
    """Registry and folder of this project's images, such as `ghcr.io/me`."""
    accelerators: dict[str, str] = Field(default_factory=dict)
    """GPUs of a stage by its name, as SkyPilot writes them: `{train: "H100:8"}`."""
    resources: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each task's `resources`: `{infra: aws, use_spot: true}`."""
    envs: dict[str, str] = Field(default_factory=dict)
    """Environment variables, for all to see: the bucket's endpoint and region."""
    secrets: tuple[str, ...] = ()
    """Variables of the orchestrator that stages get as secrets: the credentials of the bucket."""
    dry_run: bool = False
    """Write the task file into the run's log, start nothing, and refuse the stage."""


@dataclass(frozen=True)
class Job:
    """A managed job."""

    name: str
    num_nodes: int = 1

    @property
    def title(self) -> str:
        """Its name, as people use it."""
        return f"job {self.name}"


class SkyPlace:
    """The clouds that `sky` has access to.

    Args:
        execution: Holds `runner_settings`, the grace period, and how often state is sent.

    Raises:
        UserError: A setting is wrong.
    """

    name = "skypilot"

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        try:
            self._settings = SkySettings.model_validate(execution.runner_settings)
        except ValidationError as error:
            raise UserError(f"execution.runner_settings: {error}", "correct it") from error

    def sees(self, path: Path) -> bool:
        """No machine sees a path of this one."""
        return False

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job | None:
        """See :class:`flows.runners.place.Place`."""
        done = _sky("jobs", "queue", "--skip-finished", "--output", "json")
        pattern = rf"\bgeb-[\w.-]*-{request.key[:KEY_CHARACTERS]}-[0-9a-f]{{6}}\b"
        found = re.search(pattern, done.stdout)
        return Job(found[0]) if found else None

    def submit(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job:
        """See :class:`flows.runners.place.Place`."""
        store = Store.open(request.store)
        if store.mirror_of is None:
            raise UserError(
                f"{request.place}: the store {store.root} is a folder of this machine",
                "set `store` to a bucket that the machines reach (docs/store.md)",
            )
        url = open_store(store.mirror_of).share(Path(write_request(request)))
        job = Job(work_name(request))
        task = yaml.safe_dump(task_for(request, self._execution, self._settings, job.name, url))
        if self._settings.dry_run:
            on_event(PlaceNotice(message=task))
            raise UserError(f"{request.place}: dry run, nothing was started", "unset dry_run")
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(task)
            file.flush()
            secrets = [f"--secret={name}" for name in self._settings.secrets]
            done = _sky("jobs", "launch", "--yes", "--detach-run", *secrets, file.name)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise UserError(
                f"{request.place}: sky jobs launch: {lines[-1] if lines else 'no reason given'}",
                "`sky check` and `sky show-gpus` tell what can be had",
            )
        on_event(PlaceNotice(message=f"{job.title} is pending"))
        return job

    def follow(
        self,
        work: Job,
        request: Request,
        logs: Sequence[AttemptLog],
        on_event: OnEvent,
        stopping: threading.Event,
        check_owner: Callable[[], None],
    ) -> Sequence[Ending]:
        """See :class:`flows.runners.place.Place`."""
        command = ["sky", "jobs", "logs", "--follow", "--name", work.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as reader:
            assert reader.stdout is not None
            for line in reader.stdout:
                check_owner()
                logs[0].handle_line(_PREFIX.sub("", line), on_event)
        failure = logs[0].failure
        if reader.returncode == _SUCCEEDED:
            return [Ending("exited", EXIT_OK)]
        if reader.returncode == _CANCELLED:
            remedy = "resume the run to start the stage again"
            return [
                Ending("refused", None, f"{work.title} was cancelled (sky jobs cancel)", remedy)
            ]
        if reader.returncode == _FAILED:
            is_mistake = failure is not None and failure.kind == "user"
            return [Ending("exited", EXIT_USER if is_mistake else EXIT_FAILED)]
        raise PlaceAwayError(
            f"{request.place}: `sky jobs logs` ended with exit code {reader.returncode}; the next "
            f"attempt takes {work.title} over"
        )

    def end(self, works: Sequence[Job]) -> None:
        """See :class:`flows.runners.place.Place`."""
        for work in works:
            _sky("jobs", "cancel", "--yes", "--name", work.name)

    def close(self, work: Job) -> None:
        """See :class:`flows.runners.place.Place`; SkyPilot takes machines away by itself."""

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.place.Place`."""
        return self.find(request, lambda event: None, threading.Event()) is not None


def task_for(
    request: Request, execution: Execution, settings: SkySettings, name: str, url: str
) -> dict[str, Any]:
    """SkyPilot's task for a stage.

    Args:
        request: What it computes.
        execution: The grace period, and how often state is sent.
        settings: The runner's settings.
        name: Name of the job.
        url: The request in the bucket.
    """
    wanted = request.resources
    [program] = node_commands("python", request, execution, url, _CACHE)
    [image, *_] = images_named(request.image, gpus=wanted.gpus)
    asked = {
        "image_id": f"docker:{settings.registry.rstrip('/')}/{image.tag}",
        "cpus": f"{math.ceil(wanted.cpus)}+" if wanted.cpus else None,
        "memory": f"{math.ceil(wanted.memory_gib)}+" if wanted.memory_gib else None,
        "accelerators": settings.accelerators.get(request.stage),
    }
    if wanted.gpus and asked["accelerators"] is None:
        raise UserError(
            f"{request.place}: resources.{request.stage}.gpus is {wanted.gpus}, and SkyPilot wants "
            "the kind of GPU",
            f'set execution.runner_settings.accelerators.{request.stage}, such as "H100:'
            f'{wanted.gpus}"',
        )
    variables = thread_variables(wanted) | settings.envs | fetching_variables(execution, _CACHE)
    return {
        "name": name,
        "resources": {key: value for key, value in asked.items() if value} | settings.resources,
        "envs": variables,
        "secrets": dict.fromkeys(settings.secrets),
        "run": f"exec {shlex.join(program)}\n",
    }


def _sky(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["sky", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("there is no command `sky`", "pip install 'skypilot[aws]'") from error
