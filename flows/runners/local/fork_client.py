"""Stages started by a fork server, for the process runner.

One server is kept per interpreter and environment, for as long as this process lives, so that the
runs of a sweep share it. See :mod:`stages.harness.fork_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self
from weakref import WeakSet

from flows.runners.command_lines import module_command
from stages.contract.errors import EXIT_FAILED

_servers: dict[tuple[object, ...], _Server] = {}
_lock = threading.Lock()
_TOLD_BYTES = 64


def start_forked(command: list[str], environment: Mapping[str, str], log: int) -> ForkedProcess:
    """Starts a stage and its supervisor as forks; returns before its libraries are loaded.

    Raises:
        OSError: The interpreter cannot be started.
    """
    interpreter = command[0]
    key = (interpreter, Path.cwd(), *sorted(environment.items()))
    stdin, its_stdin = socket.socketpair()
    reading, writing = os.pipe()
    stdout = os.fdopen(reading, encoding="utf-8", errors="replace")
    with its_stdin, os.fdopen(writing, "w"), _lock:
        server = _servers.get(key)
        if server is None or server.process.poll() is not None:
            server = _servers[key] = _Server(interpreter, environment, log)
        # If it has ended already, the log says why, and the start fails.
        with contextlib.suppress(OSError):
            order = json.dumps(command).encode()
            socket.send_fds(server.requests, [order], [its_stdin.fileno(), writing, log])
        process = ForkedProcess(server, stdin, stdout)
        server.processes.add(process)
    return process


class _Server:
    """A running fork server."""

    def __init__(self, interpreter: str, environment: Mapping[str, str], log: int) -> None:
        self.requests, its_stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_stdin:
            self.process = subprocess.Popen(
                module_command(interpreter, "stages.harness.fork_server"),
                stdin=its_stdin.fileno(),
                stdout=log,
                stderr=log,
                env=dict(environment),
                # A Ctrl-C in the terminal reaches the orchestrator, which then stops its stages.
                start_new_session=True,
            )
        self.processes: WeakSet[ForkedProcess] = WeakSet()
        atexit.register(self.kill)

    def kill(self) -> None:
        """Ends the server, and not its forks."""
        self.requests.close()
        self.process.kill()
        self.process.wait()


class ForkedProcess:
    """A supervisor that a fork server forked, with what the runner needs of `subprocess.Popen`."""

    def __init__(self, server: _Server, stdin: socket.socket, stdout: IO[str]) -> None:
        self._server = server
        self._stdin = stdin
        self._is_unwanted = False
        self.stdout = stdout

    def end(self) -> None:
        """Ends the supervisor's stdin, its sign to end the stage; before there is one, the server.

        The server may load libraries for a minute, or hang at a file system that does not answer.
        It stays while another stage waits for it.
        """
        self._is_unwanted = True
        with contextlib.suppress(OSError):
            self._stdin.shutdown(socket.SHUT_WR)
        is_awaited = any(process.waits() for process in self._server.processes)
        if not is_awaited and not self._told():
            self._server.kill()

    def waits(self) -> bool:
        """True while the stage is wanted, and the server has not forked its supervisor."""
        return not self._is_unwanted and not self._told()

    def wait(self) -> int:
        """Waits for the exit code, or minus the signal that killed the supervisor."""
        ended = select.poll()
        # No read event: only the end of the supervisor counts.
        ended.register(self._stdin, 0)
        ended.poll()
        match self._told():
            case [_, code]:
                return code
            case [_]:
                return -signal.SIGKILL
            case _:  # The server ended before it had forked a supervisor.
                return EXIT_FAILED

    def kill(self) -> None:
        """Kills the supervisor, and with it the stage; before there is one, the server."""
        # One that has told its exit code has ended.
        match self._told():
            case []:
                self._server.kill()
            case [pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _told(self) -> list[int]:
        """Process id and exit code of the supervisor, as far as they are known."""
        with contextlib.suppress(BlockingIOError):
            # Left in the socket: several threads read.
            numbers = self._stdin.recv(_TOLD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return [int(number) for number in numbers.split()]
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        self.end()
        self.wait()
        self._stdin.close()
