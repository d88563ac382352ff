"""Queue of an orchestrator's jobs: one squeue a round, jobs that compute a key, and their end."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flows.runners.slurm import client
from flows.runners.slurm.client import QueuedJob, SlurmUnavailableError
from flows.runners.slurm.folder import JobFolder, job_folders
from flows.runners.slurm.job import computes
from stages.contract.local_store import LocalStore
from stages.contract.request import Request

_LOGGER = logging.getLogger(__name__)


class QueuePoller:
    """Polls the queue while somebody waits for a job, and answers questions between two rounds.

    Args:
        poll_seconds: Time between two calls of squeue.
    """

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._changed = threading.Condition()
        self._num_watchers = 0
        self._thread: threading.Thread | None = None
        self._jobs: dict[str, QueuedJob] = {}
        self._seen_at = -math.inf
        self._asking = threading.Lock()
        self._hurry = threading.Event()

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Within the block the queue is polled."""
        with self._changed:
            self._num_watchers += 1
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="squeue", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._num_watchers -= 1

    def look(self, job: str, since: float) -> tuple[bool, QueuedJob | None]:
        """The job as the queue last showed it.

        Args:
            job: Its number.
            since: Of `time.monotonic`: what was seen before does not count.

        Returns:
            Whether the queue was seen since then, and the job if it was in it.
        """
        with self._changed:
            return self._seen_at > since, self._jobs.get(job)

    def recent(self, since: float = -math.inf) -> list[QueuedJob]:
        """The queue as it was a round ago at the most; of those who ask, one calls squeue.

        Args:
            since: Of `time.time`: what was seen before does not count.

        Raises:
            SlurmUnavailableError: The controller does not answer.
        """
        with self._asking:
            age = time.monotonic() - self._seen_at
            if age > min(self._poll_seconds, time.time() - since):
                self._ask()
            with self._changed:
                return list(self._jobs.values())

    def hurry(self) -> None:
        """Makes the next round come at once."""
        self._hurry.set()

    def _poll(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_watchers > 0)
            self._hurry.clear()
            try:
                with self._asking:
                    self._ask()
            except SlurmUnavailableError as error:
                # Jobs go on without their controller; their own files tell how they end.
                _LOGGER.debug("%s", error)
            self._hurry.wait(self._poll_seconds)

    def _ask(self) -> None:
        began = time.monotonic()
        jobs = {each.id: each for each in client.own_jobs()}
        with self._changed:
            self._jobs, self._seen_at = jobs, began


class Claims:
    """Claims on requests, as the store's folders and the queue tell them.

    Args:
        poller: Answers for the queue.
    """

    def __init__(self, poller: QueuePoller) -> None:
        self._poller = poller

    def of(self, request: Request) -> list[tuple[str | None, JobFolder]]:
        """Jobs that compute a request, and, without a number, those being submitted elsewhere."""
        jobs = {folder.name: job for job, folder in self.jobs(request)}
        claims: list[tuple[str | None, JobFolder]] = []
        for folder in _folders_for(request):
            if folder.name in jobs or folder.has_owner():
                claims.append((jobs.get(folder.name), folder))
            else:
                # Its orchestrator died while it called sbatch: should a job come of that, it ends.
                folder.ask_to_stop()
        return claims

    def jobs(self, request: Request) -> list[tuple[str, JobFolder]]:
        """Jobs at work or pending that compute a request, with their folders."""
        folders = {each.name: each for each in _folders_for(request)}
        # Mostly there is none, and Slurm is not asked.
        if not folders:
            return []
        jobs = self._poller.recent(since=max(each.made_at() for each in folders.values()))
        return [
            (job.id, folders[job.name]) for job in jobs if not job.is_over and job.name in folders
        ]


def _folders_for(request: Request) -> list[JobFolder]:
    store = LocalStore.open(request.store)
    folders = [each for each in job_folders(store) if computes(each.name, request)]
    # A job that has been told to end computes nothing for those who come later.
    return [each for each in folders if each.has_owner() or not each.is_stopped()]


# A batch program kills its steps so long after the grace period.
_PROGRAM_SECONDS = 15.0
# After a plain scancel Slurm kills what is left (KillWait, 30 seconds where nobody set another).
_KILL_SECONDS = 90.0
_LOOK_SECONDS = 1.0


def end_jobs(jobs: Mapping[str, JobFolder], grace_seconds: float) -> None:
    """Ends jobs and returns when they are gone: first their steps, so that stages can save.

    Args:
        jobs: Their folders by their numbers.
        grace_seconds: Time between SIGTERM and SIGKILL.
    """
    for folder in jobs.values():
        folder.ask_to_stop()
    # Where the controller does not answer, batch programs still see that they are asked.
    with contextlib.suppress(SlurmUnavailableError):
        client.cancel_pending(jobs)
        client.signal_steps(jobs)
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
