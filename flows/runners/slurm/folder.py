"""Folder of a job in the store: files by which batch program and orchestrator know of each other.

``slurm/jobs/<name>/`` below the store's root::

    request.json           the request that the job computes
    events, log, others    stdout and stderr of the stage; all that other nodes print
    slurm.out              what the batch program and srun print
    status                 how it ended: {"job": "12", "code": 0, …}, written last
    stop                   exists when the orchestrator wants the job to end

A batch program whose folder is gone does not start its stage.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from flows.runners.attempt_log import left_log
from flows.runners.place import KEY_CHARACTERS
from stages.contract.atomic import write_atomically
from stages.contract.request import Request
from stages.store.base import Store

REQUEST_FILE = "request.json"
_OUTPUTS = ("log", "others", "slurm.out")


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
    """The folder of one job, which has the job's name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.path.name

    @classmethod
    def create(cls, name: str, request: Request) -> JobFolder:
        """Makes the folder of a new job."""
        path = _jobs(request) / name
        path.mkdir(parents=True)
        content = request.model_dump_json(indent=2)
        write_atomically(path / REQUEST_FILE, content, durable=True)
        return cls(path)

    def status(self) -> Status | None:
        """End of the batch program, or None while it has not ended."""
        try:
            return Status.model_validate_json((self.path / "status").read_text())
        except (FileNotFoundError, ValidationError):
            return None

    def ask_to_stop(self) -> None:
        """Makes the batch program end its steps, or not start them."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "stop").touch()

    def is_stopped(self) -> bool:
        """True if its batch program has been told to end its steps."""
        return (self.path / "stop").exists()

    def keep_output(self, request: Request) -> None:
        """Copies the output of a dead orchestrator's job to the logs of its key."""
        log = left_log(Path(request.store), request.stage, request.key, self.name)
        with log.open("wb") as kept:
            for name in _OUTPUTS:
                with contextlib.suppress(FileNotFoundError):
                    kept.write((self.path / name).read_bytes())

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def folders_for(request: Request) -> list[JobFolder]:
    """Folders of all jobs for a key."""
    name = re.compile(rf".*-{request.key[:KEY_CHARACTERS]}-[0-9a-f]{{6}}")
    jobs = _jobs(request)
    paths = sorted(jobs.iterdir()) if jobs.is_dir() else []
    return [JobFolder(path) for path in paths if name.fullmatch(path.name)]


def _jobs(request: Request) -> Path:
    return Store.open(request.store).root / "slurm" / "jobs"
