"""Stages started by a fork server, for the process runner.

One server is kept per interpreter and environment, for as long as this process lives, so that the
runs of a sweep share it. See :mod:`stages.harness.fork_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from flows.runners.command_lines import module_command
from flows.runners.place import StageJob
from stages.contract.errors import StageFailedError, StoppedError

_LOOK_SECONDS = 0.2
_servers: dict[tuple[object, ...], _Server] = {}
# Held until a server has started a stage: no other one waits for a server that is killed.
_lock = threading.Lock()


def start_forked(
    job: StageJob, command: list[str], environment: Mapping[str, str], log: int
) -> ForkedProcess | None:
    """Starts a stage and its supervisor as forks, once its libraries are loaded.

    None if the server has ended: the same command by itself then says why.

    Raises:
        OSError: The interpreter cannot be started.
        StoppedError: The run stops.
        StageFailedError: The libraries load for longer than the stage may take.
    """
    title = job.request.title
    limit = job.request.resources.timeout_seconds or math.inf
    key = (command[0], Path.cwd(), *sorted(environment.items()))
    with _lock, contextlib.ExitStack() as held:
        if key not in _servers:
            _servers[key] = _Server(command[0], environment, log)
        stdin, its_stdin = socket.socketpair()
        reading, writing = os.pipe()
        stdout = os.fdopen(reading, encoding="utf-8", errors="replace")
        process = held.enter_context(ForkedProcess(stdin, stdout))
        held.callback(lambda: _servers.pop(key).kill())
        with its_stdin, os.fdopen(writing, "w"), contextlib.suppress(OSError):
            order = json.dumps(command).encode()
            streams = [its_stdin.fileno(), writing, log]
            socket.send_fds(_servers[key].requests, [order], streams)
        deadline = time.monotonic() + limit
        while not select.select([stdin], [], [], _LOOK_SECONDS)[0]:
            if job.stopping.is_set():
                raise StoppedError(f"{title}: stopped")
            if time.monotonic() > deadline:
                raise StageFailedError(f"{title}: took longer than timeout_seconds={limit:g}")
        if process.has_started():
            held.pop_all()
            return process
    return None


class _Server:
    """A running fork server."""

    def __init__(self, interpreter: str, environment: Mapping[str, str], log: int) -> None:
        self.requests, its_stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_stdin:
            self._process = subprocess.Popen(
                module_command(interpreter, "stages.harness.fork_server"),
                stdin=its_stdin.fileno(),
                stdout=log,
                stderr=log,
                env=dict(environment),
                # A Ctrl-C in the terminal reaches the orchestrator, which then stops its stages.
                start_new_session=True,
            )
        atexit.register(self.kill)

    def kill(self) -> None:
        """Ends the server, and not its forks."""
        self.requests.close()
        self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A supervisor that a fork server forks, with what the runner needs of `subprocess.Popen`."""

    def __init__(self, stdin: socket.socket, stdout: IO[str]) -> None:
        self._stdin = stdin
        # The process id, and at the end the exit code.
        self._lines = stdin.makefile()
        self._pid = 0
        self.stdout: IO[str] | None = stdout

    def has_started(self) -> bool:
        """Waits for the supervisor's process id; False if none comes."""
        self._pid = int(self._lines.readline() or 0)
        return self._pid > 0

    def end(self) -> None:
        """Ends the supervisor's stdin, its sign to end the stage."""
        self._stdin.shutdown(socket.SHUT_WR)

    def wait(self) -> int:
        """Waits for the exit code, or minus the signal that killed the supervisor."""
        return int(self._lines.read() or -signal.SIGKILL)

    def kill(self) -> None:
        """Kills the supervisor, and with it the stage."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.stdout is not None
        self.stdout.close()
        self.end()
        self.wait()
        self._lines.close()
        self._stdin.close()
