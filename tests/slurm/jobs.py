"""Probes and trainings as Slurm jobs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flows.pipeline.slurm import SlurmSettings
from flows.runners.slurm import client
from flows.runners.slurm.runner import SlurmRunner
from stages.contract.events import Event, Log
from stages.contract.local_store import LocalStore
from stages.contract.request import Request, Resources, make_request
from tests.probe_stage import ProbeParams

# What the settings of jobs must bring, since they get nothing of this process's environment.
CARRIED = ("PYTHONPATH", "OMP_NUM_THREADS", "PYTHONMALLOC", "GLIBC_TUNABLES", "HF_HUB_OFFLINE")


def settings(**changes: Any) -> SlurmSettings:
    """Settings of the slurm runner, quick to notice."""
    environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
    return SlurmSettings.model_validate({"environment": environment, "poll_seconds": 0.5} | changes)


def runner(grace_seconds: float = 10, **changes: Any) -> SlurmRunner:
    """A slurm runner."""
    return SlurmRunner(settings(**changes), grace_seconds=grace_seconds)


def request_for(store: LocalStore, resources: Resources | None = None, **params: Any) -> Request:
    """A request for one probe."""
    return make_request(
        ProbeParams(**params),
        inputs={},
        seed=0,
        store=str(store.root),
        run="test",
        step="probe/0",
        resources=resources,
    )


def run(request: Request, **changes: Any) -> list[Event]:
    """Runs a stage to its end and returns what it said."""
    heard: list[Event] = []
    chosen = runner(**changes)
    try:
        chosen.run(request, heard.append)
    finally:
        chosen.stop_all()
    return heard


def said(events: list[Event]) -> list[str]:
    """Messages of the log among events."""
    return [each.message for each in events if isinstance(each, Log)]


class AtWork:
    """A stage that runs in a thread.

    Args:
        request: The stage.
        runner: Runs it.
        until: Says of an event whether it was waited for.
    """

    def __init__(
        self, request: Request, runner: SlurmRunner, until: Callable[[Event], bool]
    ) -> None:
        self.heard: list[Event] = []
        self.error: BaseException | None = None
        self._until = until
        self._there = threading.Event()
        self._request = request
        self._runner = runner
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._runner.run(self._request, self._hear)
        except BaseException as error:
            self.error = error
        self._there.set()

    def _hear(self, event: Event) -> None:
        self.heard.append(event)
        if self._until(event):
            self._there.set()

    def wait(self) -> None:
        """Returns when the event has come."""
        assert self._there.wait(600)
        assert self.error is None, self.error

    def join(self) -> BaseException | None:
        """Waits for the end and returns the error that it raised."""
        self._thread.join()
        return self.error

    @property
    def job(self) -> str:
        """Number of its job."""
        first = next(each for each in said(self.heard) if each.startswith("job "))
        return first.split()[1].rstrip(":")


def hangs(event: Event) -> bool:
    """Whether a probe has said that it does nothing more."""
    return isinstance(event, Log) and event.message.startswith("pids ")


@contextlib.contextmanager
def at_work(
    request: Request, runner: SlurmRunner, until: Callable[[Event], bool] = hangs
) -> Iterator[AtWork]:
    """A stage at work while the test looks at it; it is stopped afterwards."""
    work = AtWork(request, runner, until)
    try:
        work.wait()
        yield work
    finally:
        runner.stop_all()
        work.join()


def is_over(job: str) -> bool:
    """Whether a job has ended."""
    return not any(each.id == job and not each.is_over for each in client.own_jobs())
