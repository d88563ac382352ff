"""Folder of a job in the store: files by which batch program and orchestrator know of each other.

``slurm/jobs/<name>/`` below the store's root::

    events, log, others    stdout and stderr of the stage; all that other nodes print
    slurm.out              what the batch program and srun print
    status                 how it ended: {"job": "12", "code": 0, …}, written last
    stop                   exists when the orchestrator wants the job to end
    work                   its name in the queue
    address                of a job that does not see the folder: where in the bucket its files go

The folders of jobs whose orchestrator is dead are swept; what the jobs printed is kept.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from flows.runners.attempt_log import left_log
from flows.runners.place import orchestrator_lease
from flows.runners.slurm import client
from stages.contract.atomic import write_atomically
from stages.contract.errors import StoreError
from stages.contract.request import Request
from stages.harness.job_files import STATUS_FILE, STOP_FILE, JobFiles
from stages.store.base import Store

REQUEST_FILE = "request.json"
_WORK_FILE = "work"
_ADDRESS_FILE = "address"
JOBS = "slurm/jobs"
"""Place of the folders of jobs in a store."""


class Status(BaseModel):
    """End of a batch program.

    Attributes:
        code: Exit code of the first node's step.
        others: Exit code of the other nodes' step; 0 if there is none, or the program ended it.
        reason: Why the program ended its steps by itself, if it did.
        silent: Whether another node did not end its part after the first node's end.
    """

    job: str
    code: int
    others: int = 0
    reason: Literal["", "asked", "node"] = ""
    silent: bool = False


class JobFolder:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.path.name

    @classmethod
    def create(cls, store: Store, name: str, request: Request, address: str = "") -> JobFolder:
        """Makes the folder of a new job; its files come from an address in a bucket, if any."""
        # Whole at once: others read the request of each folder that they see.
        new = cls(_jobs(store) / f".{name}")
        new.path.mkdir(parents=True)
        content = request.model_dump_json(indent=2)
        write_atomically(new.path / REQUEST_FILE, content, durable=True)
        write_atomically(new.path / _ADDRESS_FILE, address)
        if address:
            JobFiles(address, new.path).want()
        return cls(new.path.rename(_jobs(store) / name))

    @cached_property
    def address(self) -> str:
        """Address of the files of a job that does not see this folder; empty for others."""
        return self._read(_ADDRESS_FILE)

    @cached_property
    def _files(self) -> JobFiles | None:
        return JobFiles(self.address, self.path) if self.address else None

    def receive(self) -> None:
        """Brings what such a job has sent."""
        self._in_bucket(JobFiles.receive)

    def _in_bucket(self, act: Callable[[JobFiles], None]) -> None:
        """Does something with such a job's files, unless the bucket does not answer."""
        with contextlib.suppress(StoreError):
            if self._files is not None:
                act(self._files)

    def request(self) -> Request:
        """The request that the job computes."""
        return Request.read(self.path / REQUEST_FILE)

    def made_at(self) -> float:
        """Time at which it was made, of `time.time`; that of now if it is gone."""
        try:
            return (self.path / REQUEST_FILE).stat().st_mtime
        except FileNotFoundError:
            return time.time()

    def work(self) -> str:
        """Its name in the queue, see `QueuedJob.work`."""
        return self._read(_WORK_FILE) or self.name

    def set_work(self, name: str) -> None:
        """Sets its name in the queue."""
        write_atomically(self.path / _WORK_FILE, name)

    def status(self) -> Status | None:
        """End of the batch program, or None while it has not said so."""
        try:
            return Status.model_validate_json(self._read(STATUS_FILE))
        except ValidationError:
            return None

    def _read(self, name: str) -> str:
        """Content of a file; empty if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / name).read_text()
        return ""

    def ask_to_stop(self) -> None:
        """Makes the batch program end its steps, or not start them."""
        # One whose folder is gone has ended.
        with contextlib.suppress(FileNotFoundError):
            (self.path / STOP_FILE).touch()
        self._in_bucket(JobFiles.unwant)

    def is_stopped(self) -> bool:
        """True if its batch program has been told to end its steps."""
        return (self.path / STOP_FILE).exists()

    def has_owner(self) -> bool:
        """True while the orchestrator that waits for the job lives."""
        try:
            request = self.request()
        except (FileNotFoundError, ValidationError):
            # Another run has just removed it; or it is damaged, and stays for a person to look at.
            return True
        return orchestrator_lease(request.store, request.stage, request.key).holder() is not None

    def remove(self) -> None:
        """Removes the folder: what it says is kept elsewhere."""
        self._in_bucket(JobFiles.remove)
        # Out of sight first: what another run writes into it meanwhile must not keep half of it.
        hidden = self.path.with_name(f".{self.name}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def job_folders(store: Store) -> Iterator[JobFolder]:
    """Folders of all jobs of a store, by name."""
    if _jobs(store).is_dir():
        found = sorted(_jobs(store).iterdir())
        yield from (JobFolder(path) for path in found if not path.name.startswith("."))


def _jobs(store: Store) -> Path:
    return store.root / JOBS


_OUTPUTS = ("log", "others", "slurm.out")


def sweep(store: Store) -> list[str]:
    """Removes the folders of jobs that dead orchestrators left; what they printed is kept.

    Folders of jobs that Slurm still has stay. Returns a line for each that was removed.
    SlurmUnavailableError if the controller does not answer.
    """
    left = [folder for folder in job_folders(store) if not folder.has_owner()]
    # Mostly there is none, and Slurm is not asked.
    jobs = client.own_jobs() if left else []
    active = {job.work for job in jobs if not job.is_over}
    lines = []
    for folder in left:
        if folder.work() not in active:
            _keep_output(store, folder)
            folder.remove()
            lines.append(f"removed the folder of job {folder.name}: its orchestrator is gone")
    return lines


def _keep_output(store: Store, folder: JobFolder) -> None:
    request = folder.request()
    folder.receive()
    with left_log(store.root, request.stage, request.key, folder.name).open("wb") as kept:
        for name in _OUTPUTS:
            with contextlib.suppress(FileNotFoundError):
                kept.write((folder.path / name).read_bytes())
