"""Slurm runner: each stage a job of its own, on as many nodes as its resources ask for.

The store is on a file system that this host and the nodes share. A job's folder in it is all that
orchestrator and batch program need of each other; Slurm is asked for the queue, once for all jobs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.pipeline.slurm import SlurmSettings
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import OnEvent, log_once
from flows.runners.outcome import Ending
from flows.runners.place import ComputedElsewhereError, PlaceRunner
from flows.runners.slurm.folder import JobFolder, owner_path, remove_owner, sweep
from flows.runners.slurm.job import batch_program, default_interpreter, new_name
from flows.runners.slurm.queue import Claims, QueuePoller, end_jobs
from flows.runners.slurm.submission import Submitter
from flows.runners.slurm.watch import JobWatch, ending_of
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Log
from stages.contract.file_lease import FileLease
from stages.contract.local_store import LocalStore
from stages.contract.request import Request

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A job and its folder."""

    number: str
    folder: JobFolder
    num_nodes: int = 1

    @property
    def title(self) -> str:
        """What people call it."""
        return f"job {self.number}"


class SlurmPlace:
    """A Slurm cluster.

    Args:
        settings: What jobs ask for.
        interpreters: Python interpreter of a stage on the nodes where it is not this one.
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.
    """

    name = "slurm"

    def __init__(
        self,
        settings: SlurmSettings,
        interpreters: Mapping[str, str] | None,
        grace_seconds: float,
    ) -> None:
        self._settings = settings
        self._interpreters = dict(interpreters or {})
        self._grace_seconds = grace_seconds
        self._poller = QueuePoller(settings.poll_seconds)
        self._claims = Claims(self._poller)
        self._live: set[str] = set()
        self._owners: dict[Path, tuple[Path, FileLease]] = {}
        self._lock = threading.Lock()
        self._submitter = Submitter(settings, grace_seconds, has_live=lambda: bool(self._live))

    @contextlib.contextmanager
    def owning(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> Iterator[Callable[[], None]]:
        """See :class:`flows.runners.place.Place`: a job's folder says who owns it."""
        yield lambda: None

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
        overdue = threading.Event()

        def end_overdue() -> None:
            overdue.set()
            self.end([work])

        settings = self._settings.job(request.stage)
        self._live.add(work.number)
        try:
            watch = JobWatch(
                work.number, work.folder, request, settings, self._poller, logs[0], on_event
            )
            end = watch.wait(stopping, end_overdue)
        finally:
            self._live.discard(work.number)
        if overdue.is_set():
            return [Ending("overdue")]
        return [ending_of(end, request, self._signal_seconds)]

    def end(self, works: Sequence[Job]) -> None:
        """See :class:`flows.runners.place.Place`; returns when the jobs are gone."""
        if works:
            end_jobs({each.number: each.folder for each in works}, self._grace_seconds)
            self._poller.hurry()

    def close(self, work: Job) -> None:
        """See :class:`flows.runners.place.Place`."""
        work.folder.remove()

    def release_owners(self) -> None:
        """Gives back the leases that say that this orchestrator lives."""
        with self._lock:
            for path, lease in self._owners.values():
                lease.release()
                remove_owner(path)
            self._owners.clear()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        return any(not folder.has_owner() for _, folder in self._claims.jobs(request))

    @property
    def _signal_seconds(self) -> float:
        """Longest time before its time limit at which a job may be told to end."""
        return self._grace_seconds + 120

    def _owner(self, store: LocalStore) -> Path:
        """The lease by which jobs know that this orchestrator lives."""
        with self._lock:
            if store.root not in self._owners:
                for line in sweep(store):
                    _LOGGER.warning(line)
                path = owner_path(store, uuid.uuid4().hex)
                lease = FileLease(path)
                lease.acquire()
                self._owners[store.root] = path, lease
            return self._owners[store.root][0]

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job | None:
        """See :class:`flows.runners.place.Place`; waits for another run's job."""
        store = LocalStore.open(request.store)
        owner = self._owner(store)
        say = log_once(on_event)
        while claims := self._claims.of(request):
            for job, folder in claims:
                if job is not None and folder.take_over(owner):
                    return Job(job, folder)
            job = claims[0][0]
            say(f"computed by {f'job {job}' if job else 'a job'} of another run; waiting for it")
            if stopping.wait(self._settings.poll_seconds):
                raise StoppedError(f"{request.place}: stopped while waiting for another run's job")
            if store.load(request.stage, request.key) is not None:
                raise ComputedElsewhereError
        return None

    def submit(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> Job:
        """See :class:`flows.runners.place.Place`."""
        store = LocalStore.open(request.store)
        owner = self._owner(store)
        settings = self._settings.job(request.stage)
        interpreter = default_interpreter(self._interpreters, request.stage, request.image)
        if settings.container is None and not Path(interpreter).exists():
            raise UserError(
                f"no Python interpreter at {interpreter} for stage {request.stage!r}",
                "correct execution.interpreters: the nodes start it by the same path",
            )
        # Where logs are kept, so that people find it after the job's folder is gone.
        request_file = write_request(request)
        folder = JobFolder.create(store, new_name(request), request, owner)
        program = batch_program(
            request,
            self._settings,
            request_file=request_file,
            folder=folder.path,
            interpreter=interpreter,
            grace_seconds=self._grace_seconds,
        )
        options = [f"--output={folder.path / 'slurm.out'}", f"--chdir={Path.cwd()}"]
        try:
            job = self._submitter.submit(request, folder.name, options, program, on_event, stopping)
        except BaseException:
            folder.remove()
            raise
        on_event(Log(message=f"job {job}: {folder.name}"))
        return Job(job, folder)


class SlurmRunner(PlaceRunner[Job]):
    """Runs each stage as a Slurm job; see :class:`SlurmPlace`."""

    def __init__(
        self,
        settings: SlurmSettings,
        interpreters: Mapping[str, str] | None = None,
        grace_seconds: float = 30.0,
    ) -> None:
        self._slurm = SlurmPlace(settings, interpreters, grace_seconds)
        super().__init__(self._slurm)

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        super().stop_all()
        self._slurm.release_owners()
