"""Wait for one job: its output is passed on as it comes, its end is found out and explained."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog
from flows.runners.base import Ending, OnEvent, PlaceNotice, describe_exit, is_killed
from flows.runners.place import Poller
from flows.runners.slurm import client
from flows.runners.slurm.client import QueuedJob
from flows.runners.slurm.folder import JobFolder, Status
from flows.runners.slurm.submission import check_pending
from stages.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, EXIT_USER
from stages.contract.request import Request
from stages.store.base import Store

_UNSET = ("", "None", "Unknown")


def ending_of(
    job: str, status: Status | None, fields: Mapping[str, str], request: Request
) -> Ending:
    """The ending of a stage that the end of its job stands for.

    This run did not want the job to end. There is no status if its batch program could not write
    one; there are no fields if Slurm was not asked, or has forgotten the job.
    """
    code = None if status is None else status.code
    state = fields.get("JobState", "")
    if code == EXIT_USER:
        return Ending("exited", code)
    # The last word of a job whose node died may be that it ended well.
    if (why := _interruption(status, state, fields)) is not None:
        return Ending("taken", code, f"job {job} {why}")
    if code == EXIT_OK:
        return Ending("exited", code)
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
            f"left no status in the store: does the node see the store at {request.store}?",
        )
    if status.silent and code == EXIT_FAILED:
        # Slurm may tell of a lost node minutes later (SlurmdTimeout), or take it for busy.
        return Ending("taken", code, f"job {job} lost a node, which did not end its part")
    # The first node has only lost its connection when a signal ended another node's part.
    lost = code == EXIT_FAILED if not status.reason else status.reason == "node"
    if lost and is_killed(status.others):
        killed = describe_exit(status.others)
        return Ending("failed", code, f"another node's part ended by {killed}")
    if status.reason == "node":
        return Ending("failed", code, f"job {job} was ended because another node's part had failed")
    return Ending("exited", code)


def _interruption(status: Status | None, state: str, fields: Mapping[str, str]) -> str | None:
    """Reason for which Slurm ended a job that would have gone on, or None."""
    if state == "PREEMPTED" or fields.get("PreemptTime", "") not in _UNSET:
        return "was preempted"
    if state in ("NODE_FAIL", "BOOT_FAIL"):
        return f"lost a node ({state})"
    if state == "TIMEOUT":
        return f"reached its time limit ({fields.get('TimeLimit', 'unknown')})"
    # For the reason `node` the batch program itself ended the first node's part.
    if status is None or status.code != EXIT_STOPPED or status.reason == "node":
        return None
    if state == "CANCELLED":
        return None
    return "was sent SIGTERM: by Slurm, near its time limit, by a person, or for want of a run"


# Between two looks at a job's files.
_LOOK_SECONDS = 0.5
# What a node wrote last may reach this host so much later, over a shared file system.
_SETTLE_SECONDS = 20.0
# A job is COMPLETING for a moment after its end; its final state comes then.
_FINAL_SECONDS = 60.0
_NOT_FINAL = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")


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
        except FileNotFoundError:
            return
        whole = data if last else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        # Bytes: a text has more kinds of line ends, and an event may hold them.
        for line in whole.splitlines(keepends=True):
            yield line.decode(errors="replace")


@dataclass
class JobWatch:
    """Waits for one job; ``log`` gets what it prints, ``on_event`` the stage's events."""

    job: str
    folder: JobFolder
    request: Request
    execution: Execution
    poller: Poller[QueuedJob]
    log: AttemptLog
    on_event: OnEvent

    def __post_init__(self) -> None:
        """Nothing has been read or heard so far."""
        self._events, *self._printed, self._slurm = (
            Tail(self.folder.path / name) for name in ("events", "others", "log", "slurm.out")
        )
        self._told = ""
        self._seen_at = self._began = time.monotonic()
        self._running_since: float | None = None

    def wait(
        self, stopping: threading.Event, end: Callable[[], None], check_owner: Callable[[], None]
    ) -> Ending:
        """Returns how the job has ended.

        ``end`` ends a job that has run for longer than its stage may; ``check_owner`` raises when
        the job is another orchestrator's by now.

        Raises:
            UserError: It is pending and will never start.
        """
        limit = self.request.resources.timeout_seconds
        is_overdue = False
        while True:
            check_owner()
            # Before the output is read: it is whole once the status is there.
            status = self.folder.status()
            seen_at, jobs = self.poller.look()
            queued = jobs.get(self.folder.name)
            gone = seen_at > self._began and (queued is None or queued.is_over)
            if status is not None or (gone and self._is_silent(stopping)):
                self._read(last=True)
                if is_overdue:
                    return Ending("overdue")
                return self._ending(queued, asked=stopping.is_set())
            self._read()
            if queued is not None and not gone:
                self._tell(queued)
            ran = time.monotonic() - self._running_since if self._running_since else 0.0
            if limit is not None and not is_overdue and ran > limit:
                is_overdue = True
                end()
            time.sleep(_LOOK_SECONDS)

    def _ending(self, queued: QueuedJob | None, *, asked: bool) -> Ending:
        status = self.folder.status()
        fields = dict[str, str]()
        request = self.request
        ended_well = (
            status is not None
            and status.code == EXIT_OK
            and Store.open(request.store).load(request.stage, request.key) is not None
        )
        if not (asked or ended_well):
            # A job with a silent node is COMPLETING until Slurm gives the node up.
            final_by = 0.0 if status is not None and status.silent else _FINAL_SECONDS
            deadline = time.monotonic() + final_by
            fields = client.details(self.job)
            while fields.get("JobState") in _NOT_FINAL and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                fields = client.details(self.job)
            if not fields and queued is not None:
                fields = {"JobState": queued.state}
        return ending_of(self.job, status, fields, request)

    def _is_silent(self, stopping: threading.Event) -> bool:
        """True if a job that is not in the queue will not tell its status either."""
        # One that was cancelled before it began has nothing to say.
        never_began = stopping.is_set() and self._running_since is None
        return never_began or time.monotonic() - self._seen_at > _SETTLE_SECONDS

    def _tell(self, queued: QueuedJob) -> None:
        self._seen_at = time.monotonic()
        if queued.state == "RUNNING":
            self._running_since = self._running_since or time.monotonic()
            said = f"job {self.job} runs on {queued.nodes}"
        elif queued.state == "PENDING" and queued.reason != "None":
            check_pending(queued.reason, self.request, self.execution)
            said = f"job {self.job} is pending: {queued.reason}"
        else:
            return
        if said != self._told:
            self._told = said
            self.on_event(PlaceNotice(message=said))

    def _read(self, *, last: bool = False) -> None:
        for line in self._events.new_lines(last=last):
            self.log.handle_line(line, self.on_event)
        for printed in self._printed:
            self.log.write_all(printed.new_lines(last=last))
        # What srun says of a step's end tells less than the stage's own last words.
        telling = not self.log.lines
        for line in self._slurm.new_lines(last=last):
            self.log.write(line, telling=telling)
