"""A launcher as tests of every launcher use it: its probes, disturbances, and what is left."""

import os
import signal
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import psutil
import pytest

from flows.pipeline.config import StageResources
from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from stages.contract.errors import StageFailedError
from stages.store.base import Store
from tests.flows.probes import gone
from tests.probe_stage import probe_request

RESOURCES = {stage: {"cpus": 0.5} for stage in StageResources.model_fields}
"""Resources of each stage of a run that shares this machine with other tests."""


class Mistake(NamedTuple):
    """Settings with which no stage ever starts, and parts of their error and of its remedy."""

    settings: dict[str, Any]
    words: str
    remedy: str


class Launcher(ABC):
    """Starts probes at one place."""

    name: str
    mistake: Mistake
    loss: tuple[type[StageFailedError], str]
    """Error of a stage that lost its machine, and words of its message."""

    refused: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = ()
    """Settings, and resources by stage, that `geb plan` refuses, and words of its message."""
    waits: ClassVar[dict[str, Any]] = {}
    """Settings with which a stage waits for its place, if not for this host's GPUs."""

    @abstractmethod
    def settings(self, request, **changes):
        """The launcher's part of the section `execution`."""

    @abstractmethod
    def take_machine(self, work):
        """Takes a stage's machine away, or kills it from outside."""

    @abstractmethod
    def await_end(self, request, pids):
        """Returns when a stage without an orchestrator has ended."""

    @abstractmethod
    def left(self, store):
        """Names of what is left at the place of a store's stages."""

    def request(self, store, resources=None, **params):
        """A request for one probe."""
        return probe_request(store, resources, **params)

    def execution(self, request, *, death="stop", grace_seconds=5, **changes):
        """A run's section `execution`; ``changes`` are settings of the launcher."""
        values = self.settings(request, **changes) | {"runner": self.name}
        values |= {"on_orchestrator_death": death, "grace_seconds": grace_seconds}
        return Execution.model_validate(values)

    def section(self, request, **changes):
        """The same, as it is written in a configuration."""
        execution = self.execution(request, **changes)
        return execution.model_dump(mode="json", exclude_defaults=True)

    def runner(self, request, **changes):
        """A runner with these settings."""
        return make_runner(self.execution(request, **changes))

    def run(self, request, **changes):
        """Runs a stage to its end and returns its events."""
        heard = []
        self.runner(request, **changes).run(request, heard.append)
        return heard


class Process(Launcher):
    """Subprocesses of this machine, forked by a server or not."""

    name = "process"
    loss = StageFailedError, "SIGKILL"
    mistake = Mistake({"interpreters": {"probe": "/nowhere/python"}}, "/nowhere/pyth", "setup-vllm")
    refused = (({"interpreters": {"evaluate": "/nowhere/python"}}, {}, "/nowhere/python"),)

    def __init__(self, *, fork_server):
        self._fork_server = fork_server

    def settings(self, request, **changes):
        return {"fork_server": self._fork_server} | changes

    def take_machine(self, work):
        supervisor = psutil.Process(work.pids[0]).parent()
        supervisor.send_signal(signal.SIGKILL)

    def await_end(self, request, pids):
        assert all(gone(pid) for pid in pids)

    def left(self, store):
        return []


def shared_folder(folders):
    """A folder that all test processes of a session have in common."""
    base = folders.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def logs_of(request):
    """The logs of all attempts at a request."""
    folder = Store.in_folder(request.store).log_path(request.stage, request.key)
    return "".join(log.read_text() for log in sorted(folder.glob("*.log")))


@pytest.fixture
def store(store, probe_stage, launcher):
    """A store for probes, of which nothing may be left at their place after the test."""
    yield store
    assert launcher.left(store) == []
