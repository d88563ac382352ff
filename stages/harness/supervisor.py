"""The small parent of every stage: it ends the stage when the orchestrator is gone.

``python -m stages.harness.supervisor --grace SECONDS -- COMMAND...`` starts COMMAND in a new
process group and waits. End-of-file on stdin (the orchestrator is gone) or SIGTERM sends SIGTERM
to the stage's process group and, after the grace period, SIGKILL. When the stage has ended, all
that it started and left behind is killed. The exit code is the stage's, or 128 + signal. It is
SIGTERM's, 143, if the grace period was too short.

With ``--sign FILE`` the same happens when the file has not changed for ``--sign-seconds``: the
orchestrator is on another host and renews it while it lives.

With ``--limit SECONDS`` the same happens after that time. The exit code is then 124, unless the
stage ends well all the same.

With ``--secrets`` the first line of stdin is a JSON object of environment variables for the stage:
so they are neither on a command line nor in a container's configuration.

Linux only: a subreaper, so that daemonised grandchildren are found as well.
"""

import argparse
import contextlib
import ctypes
import errno
import io
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from stages.contract.errors import EXIT_OK, EXIT_OVERDUE, EXIT_STOPPED

_POLL_SECONDS = 2.0
# Errors of a file server that is away.
_AWAY = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN)
_ENDING = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_leftovers() -> None:
    """Kills all descendants: orphaned ones become children of this process, a subreaper."""
    children = Path("/proc/thread-self/children")
    # A killed child hands its own children to us: repeat until none is left.
    while pids := children.read_text().split():
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)


def _wait_for_end_or_wish(ended: int, wake: int, options: argparse.Namespace) -> bool:
    """Returns when the child has ended, a signal came, stdin was closed, or a time is up.

    The sign is a file that changes as long as the orchestrator lives. Its times are not compared
    with this host's: clocks of hosts differ. Returns True if the time limit was reached.
    """
    watched = select.poll()
    watched.register(ended, select.POLLIN)
    watched.register(wake, select.POLLIN)
    # No read event: only the end of a pipe or socket counts, never a terminal or /dev/null.
    watched.register(0, select.POLLRDHUP)
    sign: Path | None = options.sign
    seen: tuple[int, int] | None = None
    seen_at = time.monotonic()
    deadline = seen_at + options.limit
    while (now := time.monotonic()) < deadline:
        if watched.poll(min(_POLL_SECONDS, deadline - now) * 1000):
            return False
        if sign is None:
            continue
        looked_at = time.monotonic()
        look = seen
        is_away = False
        try:
            status = sign.stat()
            look = status.st_ino, status.st_mtime_ns
        except OSError as error:
            is_away = error.errno in _AWAY
        # A file server that does not answer says nothing about the orchestrator.
        is_away = is_away or time.monotonic() - looked_at > _POLL_SECONDS
        if is_away or look != seen:
            seen = look
            seen_at = time.monotonic()
        if time.monotonic() - seen_at > options.sign_seconds:
            sys.stderr.write("no sign of the orchestrator: the stage ends\n")
            return False
    return True


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the supervisor's command line, by default this process's."""
    parser = argparse.ArgumentParser(prog="python -m stages.harness.supervisor")
    parser.add_argument("--grace", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--secrets", action="store_true", help="read them from stdin")
    parser.add_argument("--sign", type=Path, metavar="FILE", help="changes while somebody lives")
    parser.add_argument("--sign-seconds", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def become_program(command: list[str]) -> NoReturn:
    """Becomes a program."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        os._exit(127)


def supervise(
    options: argparse.Namespace, become: Callable[[list[str]], NoReturn] = become_program
) -> int:
    """Runs a program in a fork, until it ends by itself or on request; returns its exit code.

    ``become`` runs the program's command line in the fork.
    """
    if options.secrets:
        # Unbuffered, no byte more than the line: what follows is the end, which is waited for.
        os.environ.update(json.loads(io.FileIO(0, closefd=False).readline() or "{}"))
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Kept back until this process has handlers, which the program must not inherit.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        os.setpgid(0, 0)
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        become(options.command)
    # Whoever comes first: the group must be there before it is signalled.
    with contextlib.suppress(PermissionError):
        os.setpgid(pid, pid)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for signum in _ENDING:
        signal.signal(signum, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    ended = os.pidfd_open(pid)
    is_overdue = _wait_for_end_or_wish(ended, wake_read, options)
    # A group is there until its first process was waited for.
    os.killpg(pid, signal.SIGTERM)
    is_too_slow = not select.select([ended], [], [], options.grace)[0]
    os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _kill_leftovers()
    if is_overdue and code != EXIT_OK:
        return EXIT_OVERDUE
    if is_too_slow and code == -signal.SIGKILL:
        return EXIT_STOPPED
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(supervise(parse_options()))
