"""Slurm runner: each stage a job or a task of an array, on as many nodes as its resources say.

The store is on a file system that this host and the nodes share. A job's folder in it is all that
orchestrator and batch program need of each other; Slurm is asked for the queue, once for all jobs.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog
from flows.runners.base import Ending, OnEvent
from flows.runners.place import Poller, request_address, work_name
from flows.runners.slurm import client
from flows.runners.slurm.client import QueuedJob, SlurmUnavailableError
from flows.runners.slurm.folder import JOBS, JobFolder, job_folders, sweep
from flows.runners.slurm.job import computes, default_interpreter, job_values
from flows.runners.slurm.submission import Submitter
from flows.runners.slurm.watch import JobWatch
from stages.contract.errors import UserError
from stages.contract.events import Log
from stages.contract.request import Request
from stages.store.base import Store

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A job and its folder."""

    number: str
    folder: JobFolder
    num_nodes: int = 1

    @property
    def title(self) -> str:
        """Its name, as people use it."""
        return f"job {self.number}"


class SlurmPlace:
    """A Slurm cluster."""

    name = "slurm"

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._settings = execution.slurm
        self._poller: Poller[QueuedJob] = Poller(
            lambda: {each.id: each for each in client.own_jobs()},
            self._settings.poll_seconds,
            (SlurmUnavailableError,),
        )
        self._submitter = Submitter(self._settings, execution.grace_seconds)
        self._swept: set[Path] = set()
        self._sweeping = threading.Lock()

    def follow(
        self,
        work: Job,
        request: Request,
        logs: Sequence[AttemptLog],
        on_event: OnEvent,
        stopping: threading.Event,
        check_owner: Callable[[], None],
    ) -> list[Ending]:
        """See :class:`flows.runners.place.Place`."""
        settings = self._settings.job(request.stage)
        watch = JobWatch(
            work.number, work.folder, request, settings, self._poller, logs[0], on_event
        )
        return [watch.wait(stopping, lambda: self.end([work]), check_owner)]

    def end(self, works: Sequence[Job]) -> None:
        """See :class:`flows.runners.place.Place`; returns when the jobs are gone."""
        if works:
            _end_jobs({each.number: each.folder for each in works}, self._execution.grace_seconds)
            self._poller.hurry()

    def close(self, work: Job) -> None:
        """See :class:`flows.runners.place.Place`."""
        work.folder.remove()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.place.Place`."""
        return bool(self._jobs(request))

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job | None:
        """See :class:`flows.runners.place.Place`."""
        self._sweep(Store.open(request.store))
        jobs = self._jobs(request)
        for folder in _folders_for(request):
            if not any(each.folder.name == folder.name for each in jobs):
                # Its orchestrator died while it called sbatch: should a job come of that, it ends.
                folder.ask_to_stop()
        return jobs[0] if jobs else None

    def _jobs(self, request: Request) -> list[Job]:
        """Jobs at work or pending that compute a request."""
        folders = {each.work(): each for each in _folders_for(request)}
        # Mostly there is none, and Slurm is not asked.
        if not folders:
            return []
        age = time.time() - max(each.made_at() for each in folders.values())
        jobs = self._poller.recent(since=time.monotonic() - age)
        return [
            Job(job.id, folders[job.work])
            for job in jobs.values()
            if not job.is_over and job.work in folders
        ]

    def _sweep(self, store: Store) -> None:
        """Removes what dead orchestrators left in a store, before its first stage."""
        with self._sweeping:
            if store.root not in self._swept:
                for line in sweep(store):
                    _LOGGER.warning(line)
                self._swept.add(store.root)

    def submit(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job:
        """See :class:`flows.runners.place.Place`."""
        store = Store.open(request.store)
        settings = self._settings.job(request.stage)
        in_container = settings.image is not None or settings.container is not None
        interpreter = default_interpreter(
            self._execution.interpreters, request, in_image=settings.image is not None
        )
        is_shared = not in_container and self._execution.sees(Path(interpreter))
        if is_shared and not Path(interpreter).exists():
            raise UserError(
                f"no Python interpreter at {interpreter} for stage {request.stage!r}",
                "correct execution.interpreters: the nodes start it by the same path",
            )
        # Where logs are kept, so that people find it after the job's folder is gone.
        address = request_address(request, self._execution)
        name = work_name(request)
        files = f"{store.mirror_of}/{JOBS}/{name}" if "://" in address else ""
        folder = JobFolder.create(store, name, request, files)
        values = job_values(request, self._execution, address, folder, interpreter)
        try:
            job = self._submitter.submit(request, folder, values, on_event, stopping)
        except BaseException:
            folder.remove()
            raise
        on_event(Log(message=f"job {job}: {folder.name}"))
        return Job(job, folder)


def _folders_for(request: Request) -> list[JobFolder]:
    """Folders of jobs for a key, but for those that have been told to end."""
    folders = job_folders(Store.open(request.store))
    return [each for each in folders if computes(each.name, request) and not each.is_stopped()]


# A batch program kills its steps so long after the grace period.
_PROGRAM_SECONDS = 15.0
# After a plain scancel Slurm kills what is left (KillWait, 30 seconds if nobody set another).
_KILL_SECONDS = 90.0
_LOOK_SECONDS = 1.0


def _end_jobs(jobs: Mapping[str, JobFolder], grace_seconds: float) -> None:
    """Ends jobs and returns when they are gone: first their steps, so that stages can save."""
    for folder in jobs.values():
        folder.ask_to_stop()
    # Where the controller does not answer, batch programs still see that they are asked.
    with contextlib.suppress(SlurmUnavailableError):
        client.ask_to_end(jobs)
    left = _wait_until_gone(set(jobs), grace_seconds + _PROGRAM_SECONDS)
    with contextlib.suppress(SlurmUnavailableError):
        client.cancel(left)
    left = _wait_until_gone(left, _KILL_SECONDS)
    if left:
        _LOGGER.error("Slurm has not ended by now: jobs %s", ", ".join(sorted(left)))


def _wait_until_gone(jobs: set[str], seconds: float) -> set[str]:
    """Waits for jobs to leave the queue; returns those that have not."""
    deadline = time.monotonic() + seconds
    while jobs and time.monotonic() < deadline:
        with contextlib.suppress(SlurmUnavailableError):
            jobs = {each.id for each in client.own_jobs() if not each.is_over} & jobs
        if jobs:
            time.sleep(_LOOK_SECONDS)
    return jobs
