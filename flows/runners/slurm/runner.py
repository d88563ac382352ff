"""Slurm runner: each stage a job of its own, on as many nodes as its resources ask for.

The store is on a file system that this host and the nodes share. A job's folder in it is all that
orchestrator and batch program need of each other; Slurm is asked for the queue, once for all jobs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from flows.pipeline.slurm import SlurmSettings
from flows.runners.attempt_log import AttemptLog, new_log, write_request
from flows.runners.base import FailureTail, OnEvent, log_once
from flows.runners.outcome import raise_for
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


class SlurmRunner:
    """Runs each stage as a Slurm job.

    Args:
        settings: What jobs ask for.
        interpreters: Python interpreter of a stage on the nodes where it is not this one.
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.
    """

    name = "slurm"

    def __init__(
        self,
        settings: SlurmSettings,
        interpreters: Mapping[str, str] | None = None,
        grace_seconds: float = 30.0,
    ) -> None:
        self._settings = settings
        self._interpreters = dict(interpreters or {})
        self._grace_seconds = grace_seconds
        self._poller = QueuePoller(settings.poll_seconds)
        self._claims = Claims(self._poller)
        self._live: dict[str, JobFolder] = {}
        self._owners: dict[Path, tuple[Path, FileLease]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._submitter = Submitter(
            settings, grace_seconds, self._stopping, has_live=lambda: bool(self._live)
        )

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        store = LocalStore.open(request.store)
        owner = self._owner(store)
        tail = FailureTail()
        overdue = threading.Event()
        with contextlib.ExitStack() as stack:
            found = self._find_or_submit(store, request, owner, on_event)
            if found is None:
                return
            job, folder = found
            stack.enter_context(self._registered(job, folder))
            log = new_log(request)
            log_file = AttemptLog(stack.enter_context(log.open("w", encoding="utf-8")), tail)

            def end_overdue() -> None:
                overdue.set()
                self._end({job: folder})

            settings = self._settings.job(request.stage)
            watch = JobWatch(job, folder, request, settings, self._poller, log_file, tail, on_event)
            end = watch.wait(self._stopping, end_overdue)
            log_file.warn_if_incomplete(log, on_event)
        if overdue.is_set():
            tail.raise_overdue(request, str(log))
        ending = ending_of(end, request, self._signal_seconds)
        raise_for([ending], [tail], request, stopped=self._stopping.is_set(), logs=[log])

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._lock:
            self._stopping.set()
            live = dict(self._live)
        self._end(live)
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

    def _find_or_submit(
        self, store: LocalStore, request: Request, owner: Path, on_event: OnEvent
    ) -> tuple[str, JobFolder] | None:
        """A job that computes the request; None where another run's job has done so."""
        say = log_once(on_event)
        while claims := self._claims.of(request):
            for job, folder in claims:
                if job is not None and folder.take_over(owner):
                    on_event(Log(message=f"taking over job {job}, which computes this already"))
                    return job, folder
            job = claims[0][0]
            say(f"computed by {f'job {job}' if job else 'a job'} of another run; waiting for it")
            if self._stopping.wait(self._settings.poll_seconds):
                raise StoppedError(f"{request.place}: stopped while waiting for another run's job")
            if store.load(request.stage, request.key) is not None:
                return None
        return self._submit(store, request, owner, on_event)

    def _submit(
        self, store: LocalStore, request: Request, owner: Path, on_event: OnEvent
    ) -> tuple[str, JobFolder]:
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
            job = self._submitter.submit(request, folder.name, options, program, on_event)
        except BaseException:
            folder.remove()
            raise
        on_event(Log(message=f"job {job}: {folder.name}"))
        return job, folder

    @contextlib.contextmanager
    def _registered(self, job: str, folder: JobFolder) -> Iterator[None]:
        """Counts the job among those that are to be ended with the run; it is over afterwards."""
        with self._lock:
            self._live[job] = folder
            stopping = self._stopping.is_set()
        try:
            if stopping:
                self._end({job: folder})
            yield
        except BaseException:
            # Its events cannot be listened to any more, or it would never start.
            self._end({job: folder})
            raise
        finally:
            with self._lock:
                del self._live[job]
            folder.remove()

    def _end(self, jobs: Mapping[str, JobFolder]) -> None:
        """Ends jobs and returns when they are gone."""
        if jobs:
            end_jobs(jobs, self._grace_seconds)
            self._poller.hurry()
