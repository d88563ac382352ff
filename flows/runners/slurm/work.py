"""One job of Slurm and its folder in the store: its output, its end, and the reason of the end.

``slurm/jobs/<name>/`` below the store's root is all that orchestrator and batch program need of
each other::

    events, log, others    stdout and stderr of the stage; all that other nodes print
    slurm.out              what the batch program and srun print
    status                 how it ended: {"code": 0, …}, written last
    stop                   exists when the orchestrator wants the job to end

A batch program whose folder is gone does not start its stage.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import LONGEST_LINE
from flows.runners.ending import Ending, describe_exit, is_killed
from flows.runners.place import KEY_CHARACTERS, PlaceAwayError, StageJob
from flows.runners.slurm import client, submission
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_OVERDUE,
    EXIT_STOPPED,
    EXIT_USER,
)
from stages.store.base import Store

_UNSET = ("", "None", "Unknown")
_OUTPUTS = ("log", "others", "slurm.out")
POLL_SECONDS = 10.0
"""Time between two questions to Slurm for a job."""
# Between two looks at a job's files.
_LOOK_SECONDS = 0.5
# A batch program kills its steps so long after the grace period.
_PROGRAM_SECONDS = 15.0
# What a node wrote last may reach this host so much later, over a shared file system.
_SETTLE_SECONDS = 20.0
# A job is COMPLETING for a moment after its end; its final state comes then.
_FINAL_SECONDS = 60.0
_PREEMPTED = {
    "PREEMPTED": "was preempted",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "lost a node",
    "TIMEOUT": "reached its time limit",
}
_FINAL = (
    # Slurm has forgotten the job.
    "",
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "DEADLINE",
    "OUT_OF_MEMORY",
    *_PREEMPTED,
)


class Status(BaseModel):
    """End of a batch program.

    Attributes:
        code: Exit code of the first node's step.
        others: Exit code of the other nodes' step; 0 if there is none, or the program ended it.
        reason: Why the program ended its steps by itself, if it did.
        silent: Whether another node did not end its part after the first node's end.
    """

    code: int
    others: int = 0
    reason: Literal["", "asked", "node"] = ""
    silent: bool = False


class Tail:
    """Lines of a file that grows, in UTF-8; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_lines(self, *, last: bool = False) -> Iterator[str]:
        """Whole lines since the last call; with ``last`` also one that has no end yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            # Not there yet, or its file system does not answer for a moment.
            return
        is_endless = b"\n" not in data and len(data) > LONGEST_LINE
        whole = data if last or is_endless else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        # Bytes: a text has more kinds of line ends, and an event may hold them.
        for line in whole.splitlines(keepends=True):
            yield line.decode(errors="replace")


class SlurmJob:
    """A job and its folder, which has the job's name."""

    def __init__(self, number: str, folder: Path, job: StageJob, execution: Execution) -> None:
        self.title = f"job {number}"
        self._number = number
        self._folder = folder
        self._job = job
        self._execution = execution
        self._events = Tail(folder / "events")
        self._outputs = [Tail(folder / name) for name in _OUTPUTS]
        self._looked_at = -math.inf
        self._over_since = math.inf
        self._has_run = False
        self._asked_at: float | None = None
        self._is_over = False

    def follow(self) -> Ending:
        """See :class:`flows.runners.place.Work`.

        Raises:
            UserError: The job is pending and will never start.
        """
        job = self._job
        while True:
            job.check_owner()
            # Before the output is read: it is whole once the status is there.
            status = status_of(self._folder)
            self._look()
            if status is not None or self._is_silent():
                # Slurm may still run one that has left no status.
                self._is_over = status is not None
                self._read(last=True)
                return self._ending(status)
            self._read()
            if job.stopping.is_set():
                self._end()
            time.sleep(_LOOK_SECONDS)

    def remove(self) -> None:
        """See :class:`flows.runners.place.Work`."""
        if not self._is_over:
            with contextlib.suppress(PlaceAwayError):
                client.cancel(self._number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        """Ends the job's steps first, so that the stage can save, and later the job."""
        now = time.monotonic()
        # Where the controller does not answer, the batch program still sees that it is asked.
        with contextlib.suppress(PlaceAwayError):
            if self._asked_at is None:
                self._asked_at = now
                (self._folder / "stop").touch()
                client.cancel(self._number, "--state=PENDING")
                client.cancel(self._number, "--signal=TERM")
            elif now > self._asked_at + self._execution.grace_seconds + _PROGRAM_SECONDS:
                self._asked_at = now
                client.cancel(self._number)

    def _ending(self, status: Status | None) -> Ending:
        """The ending of the job, by its status, its artifact and what Slurm says about it.

        Raises:
            PlaceAwayError: The controller is away, and the job has left no status either.
        """
        request = self._job.request
        code = None if status is None else status.code
        if self._job.stopping.is_set():
            return Ending("exited", code)
        # A job whose node died may have the exit code 0.
        if code == EXIT_OK and self._job.store.load(request.stage, request.key):
            return Ending("exited", code)
        # A job with a silent node is COMPLETING until Slurm gives the node up.
        final_by = 0.0 if status is not None and status.silent else _FINAL_SECONDS
        deadline = time.monotonic() + final_by
        fields: Mapping[str, str] = {}
        try:
            fields = client.details(self._number)
            while fields.get("JobState", "") not in _FINAL and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                fields = client.details(self._number)
        except PlaceAwayError:
            # The stage's own status tells enough.
            if status is None:
                raise
        # It may have come meanwhile.
        status = status or status_of(self._folder)
        return ending_of(self._number, status, fields, request.store)

    def _look(self) -> None:
        """Asks Slurm from time to time how the job is.

        Raises:
            UserError: It will never start.
        """
        seconds = POLL_SECONDS if self._asked_at is None else 1.0
        if time.monotonic() < self._looked_at + seconds:
            return
        try:
            fields = client.details(self._number)
        except PlaceAwayError:
            # A controller that does not answer proves nothing about the job.
            self._over_since = math.inf
        else:
            self._see(fields)
        # Slurm may have taken long to answer.
        self._looked_at = time.monotonic()

    def _see(self, fields: Mapping[str, str]) -> None:
        """Notes the state that Slurm has for the job, and shows it.

        Raises:
            UserError: It will never start.
        """
        state = fields.get("JobState", "")
        # One answer may be wrong, while a controller takes over.
        if state not in _FINAL:
            self._over_since = math.inf
        elif self._over_since == math.inf:
            self._over_since = time.monotonic()
        if state == "RUNNING":
            self._has_run = True
            self._job.notice(f"job {self._number} runs on {fields['NodeList']}")
        reason = fields.get("Reason", "")
        if state == "PENDING" and reason not in _UNSET:
            self._job.notice(f"job {self._number} is pending: {reason}", waits=True)
            if submission.is_hopeless(reason):
                complaint = f"it would be pending for ever, reason {reason}"
                raise submission.mistake(complaint, self._job.request, self._execution)

    def _is_silent(self) -> bool:
        """True if a job that is over will not tell its status either."""
        # One that was cancelled before it began has nothing to say.
        never_began = self._job.stopping.is_set() and not self._has_run
        settle_seconds = 0.0 if never_began else _SETTLE_SECONDS
        return time.monotonic() > self._over_since + settle_seconds

    def _read(self, *, last: bool = False) -> None:
        for line in self._events.new_lines(last=last):
            self._job.handle_line(line)
        log = self._job.log
        for output in self._outputs:
            # The last output is srun's, whose words about a step's end tell less than the stage's.
            quoted = output is not self._outputs[-1] or not log.lines
            for line in output.new_lines(last=last):
                log.write(line, quoted=quoted)


def status_of(folder: Path) -> Status | None:
    """End of a job's batch program, or None while it has not ended."""
    try:
        return Status.model_validate_json((folder / "status").read_text())
    except (OSError, ValidationError):
        return None


def jobs_folder(store: Store) -> Path:
    """Folder of the folders of all jobs of a store."""
    return store.root / "slurm" / "jobs"


def folders_for(store: Store, key: str) -> list[Path]:
    """Folders of all jobs for a key."""
    name = f"*-{key[:KEY_CHARACTERS]}-" + "[0-9a-f]" * 6
    return sorted(jobs_folder(store).glob(name))


def ending_of(job: str, status: Status | None, fields: Mapping[str, str], store: str) -> Ending:
    """The ending of a stage whose job has ended, and left no artifact.

    The run did not ask the job to end. ``status`` is None if the batch program could not write it;
    ``fields`` is empty if Slurm has forgotten the job.
    """
    code = None if status is None else status.code
    state = fields.get("JobState", "")
    if fields.get("PreemptTime", "") not in _UNSET:
        state = "PREEMPTED"
    if code in (EXIT_USER, EXIT_OVERDUE):
        return Ending("exited", code)
    if state in _PREEMPTED:
        return Ending("preempted", code, f"job {job} {_PREEMPTED[state]}")
    if state == "CANCELLED":
        cancelled = f"job {job} was cancelled (scancel)"
        return Ending("refused", code, cancelled, "resume the run to start the stage again")
    if state == "OUT_OF_MEMORY":
        return Ending("out_of_memory", code)
    if status is None:
        return Ending(
            "failed",
            None,
            f"job {job} is over ({state or 'Slurm has forgotten it'}), and its batch program "
            f"left no status in the store: does the node see the store at {store}?",
        )
    if status.silent and code == EXIT_FAILED:
        # Slurm may report a lost node minutes later (SlurmdTimeout), or think that it is busy.
        return Ending("preempted", code, f"job {job} lost a node, which did not end its part")
    # The first node has only lost its connection when another node's part ended before.
    if status.reason == "node" or (code == EXIT_FAILED and is_killed(status.others)):
        words = describe_exit(status.others)
        return Ending("failed", code, f"another node's part ended by {words}")
    if code == EXIT_STOPPED:
        sender = "by Slurm, near its time limit, by a person, or because its run ended"
        return Ending("preempted", code, f"job {job} was sent SIGTERM: {sender}")
    return Ending("exited", code)
