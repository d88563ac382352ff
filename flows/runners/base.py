"""Command lines of stages, and the error for the end of a stage."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    PreemptedError,
    RefusedError,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Event, Failure, Log
from stages.contract.request import Request, Resources

# Last lines of a failed stage's log that people see; the message names the file, which has all.
KEPT_LINES = 30
SUPERVISOR_SECONDS = 10
"""A stage is killed after its grace period; the supervisor needs a moment to see that through."""
# By default GNU OpenMP, which PyTorch has on CPUs, spins for milliseconds: beside other busy
# programs a training took twice the CPU time, waiting for threads that did not run.
_SPIN_ROUNDS = "1000"
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# As tqdm draws it: `45%|████▌     | 9/20 [00:03<00:04]`.
_PROGRESS_BAR = re.compile(r"\d%\|.*\|")
OnEvent = Callable[[Event], None]


class PlaceNotice(Log):
    """A line on a stage's place; `geb status` shows the last one while the stage is at work."""


def log_once(on_event: OnEvent) -> Callable[[str], None]:
    """Passes the first message on, as a line of the log, and drops later ones."""
    said = False

    def say(message: str) -> None:
        nonlocal said
        if not said:
            said = True
            on_event(PlaceNotice(message=message))

    return say


@contextlib.contextmanager
def time_limit(seconds: float | None, end: Callable[[], None]) -> Iterator[threading.Event]:
    """Calls ``end`` after so many seconds of the block; the event is set if that happened."""
    overdue = threading.Event()

    def end_overdue() -> None:
        overdue.set()
        end()

    timer = threading.Timer(seconds or threading.TIMEOUT_MAX, end_overdue)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        yield overdue
    finally:
        timer.cancel()


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


def preflight_request(stage: str, resources: Resources, store: str = "") -> Request:
    """A request for a stage's resources and nothing else, to ask whether a cluster takes it."""
    return Request(
        stage=stage,
        version="",
        params={},
        seed=0,
        inputs={},
        key="0" * 64,
        store=store,
        image="core",
        writes_registry=False,
        resources=resources,
    )


def program_of(request: Request, path: str) -> list[str]:
    """Module and arguments of a request's program, which sees the request at ``path``."""
    return [f"stages.{request.stage}", path]


def module_command(python: str, *program: str) -> list[str]:
    """Command line of a module and its arguments.

    -P: a folder `stages` where the user stands is no part of this project.
    """
    return [python, "-P", "-m", *program]


def supervised(python: str, grace_seconds: float, *options: str, program: list[str]) -> list[str]:
    """Command line of a program, module and arguments, under its supervisor.

    Both run in ``python``, by its path or name at their place. ``options`` are the supervisor's.
    """
    grace = ["--grace", str(grace_seconds)]
    supervisor = module_command(python, "stages.harness.supervisor", *grace, *options)
    return [*supervisor, "--", *module_command(python, *program)]


class FailureTail:
    """Last lines and failure event of a stage's log, for the message of its error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.failure: Failure | None = None

    def add_line(self, line: str) -> None:
        """Keeps a line of the log, unless it is the bar by which a library shows progress."""
        if not _PROGRESS_BAR.search(line):
            self.lines.append(line)


def is_killed(code: int) -> bool:
    """True for an exit code of a program that a signal ended, other than the wish to stop."""
    return code > 128 and code != EXIT_STOPPED


def describe_exit(code: int) -> str:
    """Words for an exit code: the signal if one ended the program."""
    if code <= 128:
        return f"exit code {code}"
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    return "SIGKILL (the kernel does that when memory runs out)" if name == "SIGKILL" else name


Kind = Literal["refused", "taken", "out_of_memory", "overdue", "failed", "exited"]
# Whichever comes first explains the endings of the others.
_ORDER: tuple[Kind, ...] = ("refused", "taken", "out_of_memory", "failed", "overdue", "exited")


@dataclass(frozen=True)
class Ending:
    """End of one node's part of a stage: of its container, its pod or its job.

    Attributes:
        kind: ``exited``: by itself; ``out_of_memory``: killed at its limit; ``overdue``: its time
            limit; ``taken``: the place took its machine; ``refused``: a person has to change
            something; ``failed``: something else, which the message tells.
        code: Exit code, if its program had one.
    """

    kind: Kind
    code: int | None = None
    message: str = ""
    remedy: str = ""

    @property
    def is_killed(self) -> bool:
        """True if a signal that was not the wish to stop ended the program."""
        return self.kind == "exited" and is_killed(self.code or 0)

    @property
    def is_cause(self) -> bool:
        """True if no other node's failure can be the reason: connections end with a node."""
        return self.kind != "exited" or self.is_killed or self.code == EXIT_USER

    def or_taken(self, why: Callable[[], str]) -> Ending:
        """This ending of a node that was deleted: ``taken``, unless its program ended by itself."""
        if self.kind == "exited" and self.code not in (EXIT_OK, EXIT_FAILED, EXIT_USER):
            return Ending("taken", self.code, why())
        return self


def raise_for(
    endings: Sequence[Ending], tails: Sequence[FailureTail], request: Request, *, stopped: bool
) -> None:
    """Raises the error of an attempt; returns if its first node ended well."""
    if endings[0] == Ending("exited", EXIT_OK):
        return
    culprit = min(range(len(endings)), key=lambda each: _rank(endings[each]))
    ending = endings[culprit]
    tail = tails[culprit]
    if not stopped:
        _raise_for_kind(ending, tail, request, culprit if len(endings) > 1 else None)
    code = EXIT_STOPPED if ending.code is None else ending.code
    where = f"{request.place} ({request.stage} {request.key[:12]})"
    said = tail.failure.message if tail.failure else ""
    if code == EXIT_USER and tail.failure is not None:
        raise UserError(f"{where}: {said}", tail.failure.remedy)
    if stopped:
        raise StoppedError(f"{where}: stopped")
    if not said:
        last = tail.lines[-1] if tail.lines else "it printed nothing"
        said = f"ended by {describe_exit(code)}: {last}"
    elif code not in (1, EXIT_STOPPED):
        said = f"{said} ({describe_exit(code)})"
    raise StageFailedError(f"{where}: {said}; log: {tail.path}", tuple(tail.lines))


def _rank(ending: Ending) -> tuple[int, bool, bool, bool]:
    """Order of explanations; among programs, killed ones first, those ended by others last."""
    mistake = ending.kind == "exited" and ending.code == EXIT_USER
    kind = 0 if mistake else _ORDER.index(ending.kind)
    return kind, ending.code in (EXIT_OK, EXIT_STOPPED), not mistake, not ending.is_killed


def _raise_for_kind(ending: Ending, tail: FailureTail, request: Request, node: int | None) -> None:
    where = f"{request.place} ({request.stage} {request.key[:12]})"
    if node is not None:
        where += f" (node {node + 1} of {request.resources.nodes})"
    last = tuple(tail.lines)
    match ending.kind:
        case "refused":
            raise RefusedError(f"{where}: {ending.message}", ending.remedy)
        case "taken":
            raise PreemptedError(f"{where}: {ending.message.strip(': ')}; log: {tail.path}", last)
        case "out_of_memory":
            limit = request.resources.memory_gib
            of = f"its memory limit of {limit:g} GiB" if limit else "its machine's memory"
            raise StageFailedError(
                f"{request.place}: the stage used up {of} and the kernel killed it "
                f"(exit code {ending.code or 0}); raise resources.{request.stage}.memory_gib, or "
                f"give the stage less to do at a time; log: {tail.path}",
                last,
            )
        case "failed":
            raise StageFailedError(f"{where}: {ending.message}; log: {tail.path}", last)
        case "overdue":
            raise StageFailedError(
                f"{request.place}: took longer than timeout_seconds="
                f"{request.resources.timeout_seconds:g}; log: {tail.path}",
                last,
            )
