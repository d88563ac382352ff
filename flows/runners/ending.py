"""Endings of stages at their places, and the errors that they become."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from flows.runners.attempt_log import AttemptLog
from stages.contract.errors import (
    EXIT_OK,
    EXIT_OVERDUE,
    EXIT_STOPPED,
    EXIT_USER,
    PreemptedError,
    RefusedError,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.request import Request

EndingKind = Literal["refused", "preempted", "out_of_memory", "failed", "exited"]


@dataclass(frozen=True)
class Ending:
    """End of a stage: of its process, its container, its pods or its job.

    Attributes:
        kind: ``exited``: by itself, or at its time limit; ``out_of_memory``: killed at its limit;
            ``preempted``: the place took its machine; ``refused``: a person has to change
            something; ``failed``: something else, which the message tells.
        code: Exit code, if its program had one.
    """

    kind: EndingKind
    code: int | None = None
    message: str = ""
    remedy: str = ""


def is_killed(code: int | None) -> bool:
    """True for an exit code of a program that a signal ended, other than the wish to stop."""
    return code is not None and code > 128 and code != EXIT_STOPPED


def describe_exit(code: int | None) -> str:
    """Words for an exit code: the signal if one ended the program."""
    if code == 128 + signal.SIGKILL:
        return "SIGKILL (the kernel does that when memory runs out)"
    signals = {128 + number: number.name for number in signal.Signals}
    return signals.get(code or 0, f"exit code {code}")


def raise_for(ending: Ending, log: AttemptLog, request: Request, *, stopped: bool) -> None:
    """Raises the error of an attempt; returns if the stage ended well."""
    if ending == Ending("exited", EXIT_OK):
        return
    where = f"{request.title} ({request.stage} {request.key[:12]})"
    if ending.code == EXIT_USER and log.failure is not None:
        raise UserError(f"{where}: {log.failure.message}", log.failure.remedy)
    if stopped:
        raise StoppedError(f"{where}: stopped")
    if ending.kind == "refused":
        raise RefusedError(f"{where}: {ending.message}", ending.remedy)
    reason = ending.message or _explain(ending, log, request)
    message = f"{where}: {reason}; log: {log.path}"
    if ending.kind == "preempted":
        raise PreemptedError(message, tuple(log.lines))
    raise StageFailedError(message, tuple(log.lines))


def _explain(ending: Ending, log: AttemptLog, request: Request) -> str:
    """Words for the end of a stage by its own program, or at a limit."""
    if ending.kind == "out_of_memory":
        setting = f"resources.{request.stage}.memory_gib"
        return (
            f"the stage used up its memory ({setting}={request.resources.memory_gib}) and the "
            "kernel killed it; raise this setting, or give the stage less to do at a time"
        )
    if ending.code == EXIT_OVERDUE and request.resources.timeout_seconds:
        return f"took longer than timeout_seconds={request.resources.timeout_seconds:g}"
    exit_words = describe_exit(ending.code)
    if log.failure is None:
        last = log.lines[-1] if log.lines else "it printed nothing"
        return f"ended by {exit_words}: {last}"
    if is_killed(ending.code):
        return f"{log.failure.message} ({exit_words})"
    return log.failure.message
