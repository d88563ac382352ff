"""Wait for one job: its output is passed on as it comes, its end is found out and explained."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.pipeline.slurm import SlurmJobSettings
from flows.runners.attempt_log import AttemptLog
from flows.runners.base import OnEvent, describe_exit, is_killed
from flows.runners.outcome import Ending
from flows.runners.slurm import client
from flows.runners.slurm.client import QueuedJob
from flows.runners.slurm.folder import JobFolder, Status
from flows.runners.slurm.queue import QueuePoller
from flows.runners.slurm.submission import check_pending
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
)
from stages.contract.events import Log
from stages.contract.request import Request

_UNSET = ("", "None", "Unknown")


@dataclass(frozen=True)
class JobEnd:
    """What is known of the end of a job.

    Attributes:
        job: Its number.
        status: What its batch program said, or None where it could not.
        state: Slurm's word for it; empty where Slurm knows nothing of it any more.
        fields: What Slurm says of the job, where it was asked.
    """

    job: str
    status: Status | None
    state: str
    fields: Mapping[str, str]


def interruption(end: JobEnd, signal_seconds: float) -> str | None:
    """Reason for which Slurm ended a job that would have gone on, or None.

    Args:
        end: The end.
        signal_seconds: Longest time before its time limit at which a job may be sent SIGTERM.
    """
    fields = end.fields
    if end.state == "PREEMPTED" or fields.get("PreemptTime", "") not in _UNSET:
        return "was preempted"
    if end.state in ("NODE_FAIL", "BOOT_FAIL"):
        return f"lost a node ({end.state})"
    if end.state == "TIMEOUT":
        return f"reached its time limit ({fields.get('TimeLimit', 'unknown')})"
    if end.status is None or end.status.code != EXIT_STOPPED:
        return None
    if end.status.reason == "node":
        # The batch program ended the first node's part.
        return None
    if end.status.reason == "orphaned":
        return "ended itself, since its orchestrator gave no sign of life"
    limit, ran = _seconds(fields.get("TimeLimit", "")), _seconds(fields.get("RunTime", ""))
    if limit is not None and ran is not None and ran + signal_seconds >= limit:
        return f"came near its time limit ({fields['TimeLimit']})"
    return None if end.state == "CANCELLED" else "was sent SIGTERM, by Slurm or by a person"


def ending_of(end: JobEnd, request: Request, signal_seconds: float) -> Ending:
    """The ending of a stage that the end of its job stands for.

    Args:
        end: The end, of a job that this run did not want to end.
        request: What it computed.
        signal_seconds: See :func:`interruption`.
    """
    status = end.status
    code = None if status is None else status.code
    if code in (EXIT_OK, EXIT_USER):
        return Ending("exited", code)
    if (why := interruption(end, signal_seconds)) is not None:
        return Ending("taken", code, f"job {end.job} {why}")
    if end.state == "CANCELLED":
        return Ending(
            "refused",
            code,
            f"job {end.job} was cancelled (scancel)",
            "resume the run to start the stage again",
        )
    if end.state == "OUT_OF_MEMORY":
        return Ending("out_of_memory", code)
    if status is None:
        return Ending(
            "failed",
            None,
            f"job {end.job} is over ({end.state or 'Slurm has forgotten it'}), and its batch "
            f"program left no status in the store: does the node see the store at {request.store}?",
        )
    if _killed_elsewhere(status):
        killed = describe_exit(status.others)
        return Ending("failed", code, f"another node's part ended by {killed}")
    if status.reason == "node":
        ended = f"job {end.job} was ended because another node's part had failed"
        return Ending("failed", code, ended)
    return Ending("exited", code)


def _killed_elsewhere(status: Status) -> bool:
    """True where a signal ended another node's part: the first one only lost its connection."""
    lost = status.code == EXIT_FAILED if not status.reason else status.reason == "node"
    return lost and is_killed(status.others)


def _seconds(text: str) -> float | None:
    """Seconds of a time as Slurm writes it, ``1-02:03:04``; None for UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


# Between two looks at a job's files.
_LOOK_SECONDS = 0.5
# What a node wrote last may reach this host so much later, over a shared file system.
_SETTLE_SECONDS = 20.0
# A job is COMPLETING for a moment after its end; its final state comes then.
_FINAL_SECONDS = 60.0
_NOT_FINAL = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")


class Tail:
    """Lines of a file that grows, in UTF-8.

    Args:
        path: The file, which may not be there yet.
    """

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


class JobWatch:
    """Waits for one job.

    Args:
        job: Its number.
        folder: Its folder.
        request: What it computes.
        settings: What it asked Slurm for.
        poller: Sees the queue.
        log: Gets what the job prints.
        on_event: Gets the stage's events.
    """

    def __init__(
        self,
        job: str,
        folder: JobFolder,
        request: Request,
        settings: SlurmJobSettings,
        poller: QueuePoller,
        log: AttemptLog,
        on_event: OnEvent,
    ) -> None:
        self._job = job
        self._folder = folder
        self._request = request
        self._settings = settings
        self._poller = poller
        self._log = log
        self._on_event = on_event
        self._events = Tail(folder.path / "events")
        self._printed = [Tail(folder.path / name) for name in ("others", "log")]
        self._slurm = Tail(folder.path / "slurm.out")
        self._told = ""
        self._heartbeat = ""
        self._began = time.monotonic()
        self._sign_at = self._began
        self._running_since: float | None = None

    def wait(self, stopping: threading.Event, overdue: Callable[[], None]) -> JobEnd:
        """Returns when the job has ended.

        Args:
            stopping: Set when the job is being ended by this process.
            overdue: Called once when the job has run for longer than its stage may.

        Raises:
            UserError: It is pending and will never start.
        """
        limit = self._request.resources.timeout_seconds
        with self._poller.polling():
            while True:
                # Before the output is read: it is whole once the status is there.
                status = self._folder.status()
                seen, queued = self._poller.look(self._job, self._began)
                gone = seen and (queued is None or queued.is_over)
                if status is not None or (gone and self._is_silent(stopping)):
                    self._read(last=True)
                    return self._ending(queued, asked=stopping.is_set())
                self._read()
                if queued is not None and not gone:
                    self._tell(queued)
                if limit is not None and self._ran() > limit:
                    limit = None
                    overdue()
                time.sleep(_LOOK_SECONDS)

    def _ending(self, queued: QueuedJob | None, *, asked: bool) -> JobEnd:
        status = self._folder.status()
        if asked or (status is not None and status.code == 0):
            return JobEnd(self._job, status, queued.state if queued else "", {})
        fields = client.details(self._job)
        deadline = time.monotonic() + _FINAL_SECONDS
        while fields.get("JobState") in _NOT_FINAL and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            fields = client.details(self._job)
        state = fields.get("JobState") or (queued.state if queued else "")
        return JobEnd(self._job, status, state, fields)

    def _is_silent(self, stopping: threading.Event) -> bool:
        """True where a job that is not in the queue says nothing more either."""
        heartbeat = self._folder.heartbeat()
        if heartbeat != self._heartbeat:
            self._heartbeat, self._sign_at = heartbeat, time.monotonic()
        # One that was cancelled before it began has nothing to say.
        never_began = stopping.is_set() and not heartbeat
        return never_began or time.monotonic() - self._sign_at > _SETTLE_SECONDS

    def _tell(self, queued: QueuedJob) -> None:
        self._sign_at = time.monotonic()
        if queued.state == "RUNNING":
            self._running_since = self._running_since or time.monotonic()
            said = f"job {self._job} runs on {queued.nodes}"
        elif queued.state == "PENDING" and queued.reason != "None":
            check_pending(queued.reason, self._request, self._settings)
            said = f"job {self._job} is pending: {queued.reason}"
        else:
            return
        if said != self._told:
            self._told = said
            self._on_event(Log(message=said))

    def _ran(self) -> float:
        return time.monotonic() - self._running_since if self._running_since else 0.0

    def _read(self, *, last: bool = False) -> None:
        for line in self._events.new_lines(last=last):
            self._log.handle_line(line, self._on_event)
        for printed in self._printed:
            self._log.write_all(printed.new_lines(last=last))
        # What srun says of a step's end tells less than the stage's own last words.
        telling = not self._log.tail.lines
        for line in self._slurm.new_lines(last=last):
            self._log.write(line, telling=telling)
