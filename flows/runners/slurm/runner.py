"""Slurm runner: each stage a job, on as many nodes as its resources say.

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
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import Ending, OnEvent
from flows.runners.place import Poller, work_name
from flows.runners.slurm import client, submission
from flows.runners.slurm.client import QueuedJob, SlurmUnavailableError
from flows.runners.slurm.folder import JobFolder, folders_for
from flows.runners.slurm.job import batch_program, default_interpreter
from flows.runners.slurm.watch import JobWatch
from stages.contract.errors import UserError
from stages.contract.events import Log
from stages.contract.request import Request

_LOGGER = logging.getLogger(__name__)
# A batch program kills its steps so long after the grace period.
_PROGRAM_SECONDS = 15.0
# After a plain scancel Slurm kills what is left (KillWait, 30 seconds if nobody set another).
_KILL_SECONDS = 90.0
_LOOK_SECONDS = 1.0


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
        self._poller: Poller[QueuedJob] = Poller(
            lambda: {job.name: job for job in client.own_jobs()},
            submission.POLL_SECONDS,
            (SlurmUnavailableError,),
        )

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
        watch = JobWatch(
            work.number, work.folder, request, self._execution, self._poller, logs[0], on_event
        )
        return [watch.wait(stopping, lambda: self.end([work]), check_owner)]

    def end(self, works: Sequence[Job]) -> None:
        """See :class:`flows.runners.place.Place`; returns when the jobs are gone."""
        if works:
            _end_jobs({job.number: job.folder for job in works}, self._execution.grace_seconds)
            self._poller.hurry()

    def close(self, work: Job) -> None:
        """See :class:`flows.runners.place.Place`."""
        work.folder.remove()

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job | None:
        """See :class:`flows.runners.place.Place`; folders of jobs that are over are removed."""
        folders = folders_for(request)
        # Mostly there is none, and Slurm is not asked.
        jobs = {job.name: job for job in client.own_jobs() if not job.is_over} if folders else {}
        work = None
        for folder in folders:
            job = jobs.get(folder.name)
            if job is None:
                # Should sbatch still make a job of it, that one ends at once.
                folder.keep_output(request)
                folder.remove()
            elif not folder.is_stopped():
                work = Job(job.id, folder)
        return work

    def submit(
        self, request: Request, log: Path, on_event: OnEvent, stopping: threading.Event
    ) -> Job:
        """See :class:`flows.runners.place.Place`."""
        execution = self._execution
        interpreter = default_interpreter(execution, request)
        in_container = execution.slurm.job(request.stage).container is not None
        if not in_container and not Path(interpreter).exists():
            raise UserError(
                f"no Python interpreter at {interpreter} for stage {request.stage!r}",
                "correct execution.interpreters: the nodes start it by the same path",
            )
        name = work_name(request)
        folder = JobFolder.create(name, request)
        try:
            # Where logs are kept, so that people find it after the job's folder is gone.
            path = write_request(request)
            program = batch_program(request, execution, path, folder, interpreter)
            number = submission.submit(request, execution, name, program, on_event, stopping)
        except BaseException:
            folder.remove()
            raise
        on_event(Log(message=f"job {number}: {name}"))
        return Job(number, folder)


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
            jobs = {job.id for job in client.own_jobs() if not job.is_over} & jobs
        if jobs:
            time.sleep(_LOOK_SECONDS)
    return jobs
