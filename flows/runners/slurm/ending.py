"""Ends of a job, told apart: the stage's own and Slurm's (preemption, limits, lost nodes). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from flows.runners.base import FailureTail, describe_exit, is_killed
from flows.runners.slurm.folder import Status
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER,
    PreemptedError,
    StageFailedError,
    UserError,
)
from stages.contract.request import Request

_UNSET = ("", "None", "Unknown")


@dataclass(frozen=True)
class Ending:
    """End of a job.

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


def interruption(ending: Ending, signal_seconds: float) -> str | None:
    """Reason for which Slurm ended a job that would have gone on, or None.

    Args:
        ending: The end.
        signal_seconds: Longest time before its time limit at which a job may be sent SIGTERM.
    """
    fields = ending.fields
    if ending.state == "PREEMPTED" or fields.get("PreemptTime", "") not in _UNSET:
        return "was preempted"
    if ending.state in ("NODE_FAIL", "BOOT_FAIL"):
        return f"lost a node ({ending.state})"
    if ending.state == "TIMEOUT":
        return f"reached its time limit ({fields.get('TimeLimit', 'unknown')})"
    if ending.status is None or ending.status.code != EXIT_STOPPED:
        return None
    if ending.status.reason == "node":
        # The batch program ended the first node's part.
        return None
    if ending.status.reason == "orphaned":
        return "ended itself, since its orchestrator gave no sign of life"
    limit, ran = _seconds(fields.get("TimeLimit", "")), _seconds(fields.get("RunTime", ""))
    if limit is not None and ran is not None and ran + signal_seconds >= limit:
        return f"came near its time limit ({fields['TimeLimit']})"
    return None if ending.state == "CANCELLED" else "was sent SIGTERM, by Slurm or by a person"


def raise_for(
    ending: Ending, request: Request, tail: FailureTail, *, signal_seconds: float, log: str
) -> None:
    """Raises the error that the end of a job stands for; returns where the stage ended well.

    Args:
        ending: The end, of a job that nobody of ours wanted to end.
        request: What it computed.
        tail: Last lines and failure of the stage.
        signal_seconds: See :func:`interruption`.
        log: The attempt's log.
    """
    where = f"{request.place} ({request.stage} {request.key[:12]})"
    status, lines = ending.status, tuple(tail.lines)
    if status is not None and status.code in (0, EXIT_USER):
        tail.raise_for(status.code, request, stopped=False, log=log)
        return
    if (why := interruption(ending, signal_seconds)) is not None:
        raise PreemptedError(f"{where}: job {ending.job} {why}; log: {log}", lines)
    if ending.state == "CANCELLED":
        raise UserError(
            f"{where}: job {ending.job} was cancelled (scancel)",
            "resume the run to start the stage again",
        )
    if ending.state == "OUT_OF_MEMORY":
        raise StageFailedError(
            f"{where}: job {ending.job} used up its memory; raise "
            f"resources.{request.stage}.memory_gib, or give the stage less to do at a time; log: "
            f"{log}",
            lines,
        )
    if status is None:
        raise StageFailedError(
            f"{where}: job {ending.job} is over ({ending.state or 'Slurm has forgotten it'}), and "
            "its batch program left no status in the store: does the node see the store at "
            f"{request.store}? log: {log}",
            lines,
        )
    if _killed_elsewhere(status):
        raise StageFailedError(
            f"{where}: another node's part ended by {describe_exit(status.others)}; log: {log}",
            lines,
        )
    if status.reason == "node":
        raise StageFailedError(
            f"{where}: job {ending.job} was ended because another node's part had failed; log: "
            f"{log}",
            lines,
        )
    tail.raise_for(status.code, request, stopped=False, log=log)


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
