"""Protocol of the runners, and the error that each exit code of a stage stands for."""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

from stages.contract.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Event, Failure, Log
from stages.contract.request import Request, Resources

KEPT_LINES = 50
# By default GNU OpenMP, which PyTorch has on CPUs, spins for milliseconds: beside other busy
# programs a training took twice the CPU time, waiting for threads that did not run.
_SPIN_ROUNDS = "1000"
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# As tqdm draws it: `45%|████▌     | 9/20 [00:03<00:04]`.
_PROGRESS_BAR = re.compile(r"\d%\|.*\|")
OnEvent = Callable[[Event], None]


class Runner(Protocol):
    """Starts stages and waits for them. Safe to use from several threads."""

    name: str

    def run(self, request: Request, on_event: OnEvent) -> None:
        """Runs one stage to its end; afterwards its artifact is in the store.

        Args:
            request: What to compute.
            on_event: Called in the calling thread with every event of the stage.

        Raises:
            UserError: The stage refused the request or its data (exit code 64).
            StageFailedError: It ended otherwise; a retry may help.
            PreemptedError: The scheduler or the host took its machine from it: a kind of
                StageFailedError that uses up no retry while checkpoints move on.
            StoppedError: :meth:`stop_all` ended it.
        """
        ...

    def stop_all(self) -> None:
        """Ends all stages that are running and returns when they are gone."""
        ...

    def has_running(self, request: Request) -> bool:
        """True where :meth:`run` would take over a stage that a dead orchestrator left running."""
        ...


def log_once(on_event: OnEvent) -> Callable[[str], None]:
    """Passes the first message on, as a line of the log, and drops those that follow."""
    said = False

    def say(message: str) -> None:
        nonlocal said
        if not said:
            said = True
            on_event(Log(message=message))

    return say


def thread_variables(resources: Resources) -> dict[str, str]:
    """Environment variables for the threads of a stage's libraries.

    With a limit of CPUs the libraries are held to that. Threads that wait for each other spin for
    some microseconds only, unless the orchestrator's own environment says otherwise.
    """
    waiting = {name: os.environ[name] for name in _WAITING if name in os.environ}
    variables = waiting or {"GOMP_SPINCOUNT": _SPIN_ROUNDS}
    if resources.cpus is not None:
        threads = str(max(1, int(resources.cpus)))
        variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return variables


def supervised(python: str, grace_seconds: float, *options: str, program: list[str]) -> list[str]:
    """Command line of a program under its supervisor.

    Args:
        python: Interpreter of both, by its path or name at the place where they run.
        grace_seconds: Time between SIGTERM and SIGKILL.
        options: Further options of `stages.contract.supervisor`.
        program: Module and arguments.
    """
    supervisor = [python, "-m", "stages.contract.supervisor", "--grace", str(grace_seconds)]
    return [*supervisor, *options, "--", python, "-m", *program]


class FailureTail:
    """Last lines and failure event of a stage, for the message of its error."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.failure: Failure | None = None

    def record_event(self, event: Event) -> None:
        """Keeps the event if it is the stage's failure."""
        if isinstance(event, Failure):
            self.failure = event

    def add_line(self, line: str) -> None:
        """Keeps a line of the log, unless it is the bar by which a library shows progress."""
        if not _PROGRESS_BAR.search(line):
            self.lines.append(line)

    def raise_for(
        self,
        code: int,
        request: Request,
        *,
        stopped: bool,
        log: str,
        of_memory: Callable[[], str] | None = None,
    ) -> None:
        """Raises the error that an exit code stands for; returns for 0.

        Args:
            code: The exit code; 128 and a signal's number where that ended the stage.
            request: What was to be computed.
            stopped: Whether the runner was told to stop its stages.
            log: Address of the log.
            of_memory: Words on whether memory ran out, asked for where SIGKILL ended the stage.
        """
        if code == EXIT_OK:
            return
        where = f"{request.place} ({request.stage} {request.key[:12]})"
        said = self.failure.message if self.failure else ""
        if code == EXIT_USER and self.failure is not None:
            raise UserError(f"{where}: {said}", self.failure.remedy)
        if stopped:
            raise StoppedError(f"{where}: stopped")
        if not said:
            last = self.lines[-1] if self.lines else "it printed nothing"
            said = f"ended by {describe_exit(code, of_memory)}: {last}"
        elif code not in (1, EXIT_STOPPED):
            said = f"{said} ({describe_exit(code, of_memory)})"
        raise StageFailedError(f"{where}: {said}; log: {log}", tuple(self.lines))

    def raise_overdue(self, request: Request, log: str) -> NoReturn:
        """Raises the error of a stage that exceeded its time limit."""
        raise StageFailedError(
            f"{request.place}: took longer than timeout_seconds="
            f"{request.resources.timeout_seconds:g}; log: {log}",
            tuple(self.lines),
        )

    def raise_out_of_memory(self, request: Request, code: int, log: str) -> NoReturn:
        """Raises the error of a stage that used up its memory."""
        limit = request.resources.memory_gib
        of = f"its memory limit of {limit:g} GiB" if limit is not None else "its machine's memory"
        raise StageFailedError(
            f"{request.place}: the stage used up {of} and the kernel killed it "
            f"(exit code {code}); raise resources.{request.stage}.memory_gib, or give the stage "
            f"less to do at a time; log: {log}",
            tuple(self.lines),
        )


def is_killed(code: int) -> bool:
    """True for an exit code of a program that a signal ended, other than the wish to stop."""
    return code > 128 and code != EXIT_STOPPED


def describe_exit(code: int, of_memory: Callable[[], str] | None = None) -> str:
    """Words for an exit code: the signal where one ended the program.

    Args:
        code: The exit code; 128 and a signal's number where that ended it.
        of_memory: Words on whether memory ran out, asked for where SIGKILL ended it.
    """
    if code <= 128:
        return f"exit code {code}"
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    if name != "SIGKILL":
        return name
    known = of_memory() if of_memory is not None else ""
    return f"SIGKILL ({known or 'the kernel does that when memory runs out'})"
