"""Runner ``ray``: each stage a job of a Ray cluster, on as many of its nodes as it asks for.

Orchestrator and nodes share the store's file system and the stages' Python. The orchestrator speaks
to the cluster's dashboard alone, and needs no Ray; ``gang.py`` runs under Ray's own Python.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field, ValidationError

from flows.pipeline.placement import Execution, interpreter_of
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
    Poller,
    SilenceTeller,
    node_commands,
    work_name,
)
from flows.runners.slurm.watch import Tail
from stages.contract.errors import UserError
from stages.contract.params import Settings
from stages.contract.request import Request
from stages.store.base import Store

_LOOK_SECONDS = 0.5
_AWAY_SECONDS = 300.0
# What a job wrote last may reach this host so much later, over a shared file system.
_SETTLE_SECONDS = 10.0
_TIMEOUT_SECONDS = 30.0
_OVER = ("STOPPED", "SUCCEEDED", "FAILED")


class RaySettings(Settings):
    """Fields of `execution.runner_settings` with `runner: ray`."""

    address: str = "http://127.0.0.1:8265"
    """Address of the cluster's dashboard."""
    python: str = "python"
    """Python with Ray on the head node, by its path or name."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the stages, for all to see: nothing secret."""
    resources: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Custom resources of each node of a stage, by stage name."""
    pending_seconds: float = Field(600, gt=0)
    """Longest wait for nodes."""
    poll_seconds: float = Field(2, gt=0)
    """Time between two questions for all jobs."""


@dataclass(frozen=True)
class Job:
    """A job and its folder, whose name is the job's."""

    folder: Path
    num_nodes: int

    @property
    def title(self) -> str:
        """Its name, as people use it."""
        return f"job {self.folder.name}"


class RayPlace:
    """A Ray cluster.

    Args:
        execution: Holds `runner_settings`, interpreters and the grace period.

    Raises:
        UserError: A setting is wrong.
    """

    name = "ray"

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        try:
            self._settings = RaySettings.model_validate(execution.runner_settings)
        except ValidationError as error:
            raise UserError(f"execution.runner_settings: {error}", "correct it") from error
        # The cluster is no matter for a proxy.
        self._api = httpx.Client(
            base_url=self._settings.address, timeout=_TIMEOUT_SECONDS, trust_env=False
        )
        self._poller: Poller[dict[str, Any]] = Poller(
            self._jobs, self._settings.poll_seconds, (httpx.HTTPError,)
        )

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job | None:
        """See :class:`flows.runners.place.Place`."""
        pattern = re.compile(rf"-{request.key[:KEY_CHARACTERS]}-[0-9a-f]{{6}}$")
        for name, job in self._ask().items():
            folder = _folder(request, name)
            is_live = job["status"] not in _OVER and not (folder / "stop").exists()
            if pattern.search(name) and is_live and folder.is_dir():
                return Job(folder, request.resources.nodes)
        return None

    def submit(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job:
        """See :class:`flows.runners.place.Place`."""
        name = work_name(request)
        folder = _folder(request, name)
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(self._plan(request)))
        driver = Path(__file__).with_name("gang.py")
        asked = {"entrypoint": f"{self._settings.python} {driver} {folder}", "submission_id": name}
        try:
            self._api.post("/api/jobs/", json=asked).raise_for_status()
        except httpx.HTTPError as error:
            shutil.rmtree(folder)
            raise PlaceAwayError(f"{request.place}: {self._settings.address}: {error}") from error
        on_event(PlaceNotice(message=f"job {name} is pending"))
        return Job(folder, request.resources.nodes)

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
        tails = [
            [Tail(work.folder / f"node{number}.{end}") for end in ("events", "log")]
            for number in range(work.num_nodes)
        ]
        silence = SilenceTeller(f"the Ray cluster {self._settings.address}", on_event)
        limit = request.resources.timeout_seconds
        running_since = over_since = math.inf
        while True:
            check_owner()
            ending = self._ending(work, over_since)
            for number, (events, log) in enumerate(tails):
                for line in events.new_lines(last=ending is not None):
                    logs[number].handle_line(line, _ignore if number else on_event)
                logs[number].write_all(log.new_lines(last=ending is not None))
            now = time.monotonic()
            if ending is not None:
                is_overdue = limit is not None and now - running_since > limit
                return [Ending("overdue")] * work.num_nodes if is_overdue else ending
            silence.look(self._poller.silent_seconds)
            if self._poller.silent_seconds > _AWAY_SECONDS:
                raise PlaceAwayError(f"{request.place}: {self._settings.address} does not answer")
            job = self._poller.look()[1].get(work.folder.name, {})
            if job.get("status") in _OVER:
                over_since = min(over_since, now)
            if running_since == math.inf and (work.folder / "started").exists():
                running_since = now
                on_event(PlaceNotice(message=f"{work.title} runs"))
            if stopping.is_set() or (limit is not None and now - running_since > limit):
                self.end([work])
            time.sleep(_LOOK_SECONDS)

    def end(self, works: Sequence[Job]) -> None:
        """See :class:`flows.runners.place.Place`; who follows a job sees its end."""
        for work in works:
            if work.folder.is_dir():
                (work.folder / "stop").touch()

    def close(self, work: Job) -> None:
        """See :class:`flows.runners.place.Place`."""
        shutil.rmtree(work.folder, ignore_errors=True)

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.place.Place`."""
        return self.find(request, _ignore, threading.Event()) is not None

    def _plan(self, request: Request) -> dict[str, Any]:
        execution, resources = self._execution, request.resources
        python = interpreter_of(execution.interpreters, request.stage, request.image)
        commands = node_commands(python, request, execution, write_request(request))
        variables = thread_variables(resources) | self._settings.environment
        if not resources.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        environment = ["env", *(f"{name}={value}" for name, value in variables.items())]
        bundle = {"CPU": resources.cpus or 1.0, "GPU": float(resources.gpus)}
        if resources.memory_gib is not None:
            bundle["memory"] = resources.memory_gib * 2**30
        bundle |= self._settings.resources.get(request.stage, {})
        return {
            "commands": [environment + each for each in commands],
            "bundle": {name: amount for name, amount in bundle.items() if amount},
            "working_folder": str(Path.cwd()),
            "grace_seconds": execution.grace_seconds,
            "pending_seconds": self._settings.pending_seconds,
        }

    def _ending(self, work: Job, over_since: float) -> list[Ending] | None:
        try:
            status = json.loads((work.folder / "status.json").read_text())
        except FileNotFoundError:
            if time.monotonic() - over_since < _SETTLE_SECONDS:
                return None
            job = self._poller.look()[1].get(work.folder.name, {})
            if job.get("status") == "STOPPED":
                said = "was stopped (ray job stop)"
                ending = Ending("refused", None, f"{work.title} {said}", "resume the run")
            else:
                # Its driver ended without a word: the head node was taken from it.
                ending = Ending("taken", None, f"{work.title}: {job.get('message') or 'is gone'}")
            return [ending] * work.num_nodes
        if "error" in status:
            remedy = "lower the stage's resources, or raise pending_seconds"
            return [Ending("refused", None, status["error"], remedy)] * work.num_nodes
        return [
            Ending("taken", None, "Ray has lost its node") if code is None else _exited(code)
            for code in status["codes"]
        ]

    def _ask(self) -> dict[str, dict[str, Any]]:
        try:
            return dict(self._poller.recent(since=time.monotonic()))
        except httpx.HTTPError as error:
            raise PlaceAwayError(f"Ray at {self._settings.address}: {error}") from error

    def _jobs(self) -> dict[str, dict[str, Any]]:
        answer = self._api.get("/api/jobs/").raise_for_status().json()
        return {each["submission_id"]: each for each in answer if each.get("submission_id")}


def _exited(code: int) -> Ending:
    return Ending("exited", code)


def _folder(request: Request, name: str) -> Path:
    return Store.open(request.store).root / "ray" / name


def _ignore(event: object) -> None:
    pass
