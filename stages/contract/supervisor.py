"""The small parent of every stage: it ends the stage when the orchestrator is gone.

``python -m stages.contract.supervisor --grace SECONDS -- COMMAND...`` starts COMMAND in a session
of its own and waits. End-of-file on stdin (the orchestrator is gone) or SIGTERM sends SIGTERM
to the stage's process group and, after the grace period, SIGKILL. When the stage has ended, all
that it started and left behind is killed. The exit code is the stage's, or 128 + signal.

With ``--sign FILE`` the same happens when the file has not changed for ``--sign-seconds``: the
orchestrator is on another host and renews it while it lives.

With ``--left-log FILE`` and ``--reader PID`` (the orchestrator), what the stage prints after the
orchestrator's death goes to FILE: a pipe that breaks would end the stage before it has saved.

With ``--secrets`` the first line of stdin is a JSON object of environment variables for the stage:
so they are neither on a command line nor in a container's configuration.

Standard library only, Linux: a subreaper, so that daemonised grandchildren are found as well.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

DEFAULT_GRACE_SECONDS = 30.0
_SIGN_POLL_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


def _children() -> list[int]:
    """Direct children of this process; as it is a subreaper, orphaned descendants become these."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]


def _kill_leftovers(group: int) -> None:
    _signal_group(group, signal.SIGKILL)
    # A killed child hands its own children to us: repeat until none is left.
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


class _Sign:
    """A file that changes as long as the orchestrator lives.

    Times are this host's own: clocks of hosts differ.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._seconds = seconds
        self._seen = self._look()
        self._seen_at = time.monotonic()

    def is_overdue(self) -> bool:
        """True where the file has not changed for so long."""
        seen = self._look()
        if seen is not None and seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > self._seconds

    def _look(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


class LeftOutput:
    """Output of a stage whose orchestrator is dead, appended to the attempt's log.

    The supervisor keeps a reading end of the stage's stdout and stderr open, so that a pipe never
    breaks, and reads from it only once the orchestrator is gone.

    Args:
        log: The log.
        reader: Process id of the orchestrator.
    """

    def __init__(self, log: Path, reader: int) -> None:
        self._log = log
        self.reader: int | None = None
        """Descriptor that can be read when the orchestrator has ended; None if it has by now."""
        with contextlib.suppress(ProcessLookupError):
            self.reader = os.pidfd_open(reader)
        self._halves = {
            os.open(f"/proc/self/fd/{each}", os.O_RDONLY | os.O_NONBLOCK): b""
            for each in (1, 2)
            if stat.S_ISFIFO(os.fstat(each).st_mode)
        }

    @property
    def pipes(self) -> list[int]:
        """Reading ends of stdout and stderr."""
        return list(self._halves)

    def copy(self) -> None:
        """Appends to the log what the pipes hold by now, line by line."""
        for pipe in self._halves:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(pipe, 1 << 16):
                    *lines, self._halves[pipe] = (self._halves[pipe] + data).split(b"\n")
                    # A full disk: nobody is left who could be told.
                    with contextlib.suppress(OSError), self._log.open("ab") as file:
                        file.writelines(text for each in lines if (text := _log_text(each)))


def _log_text(line: bytes) -> bytes:
    """A line of a stage for its log: messages as text, nothing for progress and metrics."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and "type" in event:
            message = event.get("message")
            kind = event.get("level") or event.get("kind")
            return f"[{kind}] {message}\n".encode() if message else b""
    return line + b"\n"


def _wait_for_end(ended: int, seconds: float, left: LeftOutput | None) -> None:
    """Waits for the stage's end, at most so long; cares for its output if nobody else does."""
    watched = select.poll()
    watched.register(ended, select.POLLIN)
    if left and left.reader is not None:
        watched.register(left.reader, select.POLLIN)
    elif left:
        for pipe in left.pipes:
            watched.register(pipe, select.POLLIN)
    deadline = time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in watched.poll(rest * 1000)]
        if left and left.reader in ready:
            watched.unregister(left.reader)
            left.reader = None
            for pipe in left.pipes:
                watched.register(pipe, select.POLLIN)
        elif left and left.reader is None:
            left.copy()
        if ended in ready:
            return


def _wait_for_end_or_wish(ended: int, wake: int, sign: _Sign | None) -> None:
    """Returns when the child has ended, a signal came, stdin was closed, or the sign is overdue."""
    watched = select.poll()
    watched.register(ended, select.POLLIN)
    watched.register(wake, select.POLLIN)
    # No read event: only the end of a pipe counts. A terminal or /dev/null never ends the stage.
    watched.register(0, 0)
    while not watched.poll(None if sign is None else _SIGN_POLL_SECONDS * 1000):
        if sign is not None and sign.is_overdue():
            sys.stderr.write("no sign of the orchestrator: the stage ends\n")
            return


def _read_line() -> bytes:
    """The first line of stdin and no byte more: what follows is its end, which is waited for."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


class Child(Protocol):
    """A program in a session of its own."""

    @property
    def pid(self) -> int:
        """Process id, and that of its group."""
        ...

    def wait(self) -> int:
        """Waits for its end: its exit code, or minus the signal that ended it."""
        ...


def supervise(
    start: Callable[[], Child],
    grace_seconds: float,
    sign: _Sign | None = None,
    left: LeftOutput | None = None,
) -> int:
    """Starts a program and waits until it ends by itself or is told to; returns its exit code.

    Args:
        start: Starts the program.
        grace_seconds: Time between SIGTERM and SIGKILL.
        sign: Sign of life of an orchestrator on another host.
        left: Takes the output that a dead orchestrator leaves; None for pipes of other owners.

    Raises:
        OSError: It cannot be started.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: None)
    child = start()
    ended = os.pidfd_open(child.pid)
    _wait_for_end_or_wish(ended, wake_read, sign)
    _signal_group(child.pid, signal.SIGTERM)
    _wait_for_end(ended, grace_seconds, left)
    # To a stage that has ended this does nothing.
    _signal_group(child.pid, signal.SIGKILL)
    code = child.wait()
    _kill_leftovers(child.pid)
    if left and left.reader is None:
        left.copy()
    return code if code >= 0 else 128 - code


def _cannot_start(program: str, error: OSError) -> int:
    sys.stderr.write(f"cannot start {program}: {error.strerror}\n")
    return 127


def main() -> None:
    """Parses the command line and supervises."""
    parser = argparse.ArgumentParser(prog="python -m stages.contract.supervisor")
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE_SECONDS, metavar="SECONDS")
    parser.add_argument("--secrets", action="store_true", help="read them from stdin")
    parser.add_argument("--sign", type=Path, metavar="FILE", help="changes while somebody lives")
    parser.add_argument("--sign-seconds", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--left-log", type=Path, metavar="FILE", help="of the attempt")
    parser.add_argument("--reader", type=int, metavar="PID", help="of the orchestrator")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    secrets = json.loads(_read_line() or "{}") if options.secrets else {}
    sign = None if options.sign is None else _Sign(options.sign, options.sign_seconds)
    left = None if options.left_log is None else LeftOutput(options.left_log, options.reader)

    def start() -> Child:
        return subprocess.Popen(
            options.command,
            stdin=subprocess.DEVNULL,
            env=os.environ | secrets,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    try:
        code = supervise(start, options.grace, sign, left)
    except OSError as error:
        sys.exit(_cannot_start(options.command[0], error))
    sys.exit(code)


if __name__ == "__main__":
    main()
