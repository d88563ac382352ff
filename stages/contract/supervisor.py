"""The small parent of every stage: it ends the stage when whoever started it is gone.

``python -m stages.contract.supervisor --grace SECONDS -- COMMAND...`` starts COMMAND in a session
of its own and waits. End-of-file on stdin (the orchestrator is gone) or SIGTERM sends SIGTERM
to the stage's process group and, after the grace period, SIGKILL. When the stage has ended, all
that it started and left behind is killed. The exit code is the stage's, or 128 + signal.

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
import subprocess
import sys
from pathlib import Path

DEFAULT_GRACE_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
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


def _wait_for_end_or_wish(ended: int, wake: int) -> None:
    """Returns when the child has ended, a signal came, or stdin was closed."""
    watched = select.poll()
    watched.register(ended, select.POLLIN)
    watched.register(wake, select.POLLIN)
    # No read event: only the end of a pipe counts. A terminal or /dev/null never ends the stage.
    watched.register(0, 0)
    watched.poll()


def _read_line() -> bytes:
    """The first line of stdin and no byte more: what follows is its end, which is waited for."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def supervise(command: list[str], grace_seconds: float, secrets: dict[str, str]) -> int:
    """Runs ``command`` until it ends by itself or is told to; returns its exit code."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: None)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | secrets,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        return 127
    ended = os.pidfd_open(child.pid)
    _wait_for_end_or_wish(ended, wake_read)
    _signal_group(child.pid, signal.SIGTERM)
    finished = select.poll()
    finished.register(ended, select.POLLIN)
    if not finished.poll(grace_seconds * 1000):
        _signal_group(child.pid, signal.SIGKILL)
    code = child.wait()
    _kill_leftovers(child.pid)
    return code if code >= 0 else 128 - code


def main() -> None:
    """Parses the command line and supervises."""
    parser = argparse.ArgumentParser(prog="python -m stages.contract.supervisor")
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE_SECONDS, metavar="SECONDS")
    parser.add_argument("--secrets", action="store_true", help="read them from stdin")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    secrets = json.loads(_read_line() or "{}") if options.secrets else {}
    sys.exit(supervise(options.command, options.grace, secrets))


if __name__ == "__main__":
    main()
