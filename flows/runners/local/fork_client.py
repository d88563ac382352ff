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

from stages.contract.errors import EXIT_FAILED
from stages.harness.fork_server import PID_BYTES

_servers: dict[tuple[object, ...], _Server] = {}
_lock = threading.Lock()


def start_forked(
    interpreter: str,
    environment: Mapping[str, str],
    program: list[str],
    grace_seconds: float,
    log: int,
) -> ForkedProcess:
    """Starts a stage and its supervisor as forks; returns before its libraries are loaded.

    Args:
        interpreter: Path of the stage's Python.
        environment: All environment variables.
        program: Module and arguments.
        grace_seconds: Time between SIGTERM and SIGKILL.
        log: Descriptor of their stderr.

    Raises:
        OSError: The interpreter cannot be started.
    """
    order = json.dumps({"program": program, "grace_seconds": grace_seconds}).encode()
    key = (interpreter, Path.cwd(), *sorted(environment.items()))
    control, its_stdin = socket.socketpair()
    reading, writing = os.pipe()
    stdout = os.fdopen(reading, encoding="utf-8", errors="replace")
    try:
        streams = [its_stdin.fileno(), writing, log]
        with _lock:
            server = _servers.get(key)
            if server is None or not server.ask(order, streams):
                server = _servers[key] = _Server(interpreter, environment, log)
                # If it has ended already, the log says why, and the start fails.
                server.ask(order, streams)
    except BaseException:
        control.close()
        stdout.close()
        raise
    finally:
        its_stdin.close()
        os.close(writing)
    return ForkedProcess(server, _Control(fileno=control.detach()), stdout)


class _Server:
    """A running fork server."""

    def __init__(self, interpreter: str, environment: Mapping[str, str], log: int) -> None:
        self._requests, its_stdin = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [interpreter, "-m", "stages.harness.fork_server"],
                stdin=its_stdin.fileno(),
                stdout=log,
                stderr=log,
                env=dict(environment),
                # A Ctrl-C in the terminal reaches the orchestrator, which then stops its stages.
                start_new_session=True,
            )
        except OSError:
            self._requests.close()
            raise
        finally:
            its_stdin.close()

    def ask(self, order: bytes, streams: list[int]) -> bool:
        """Asks for a start; False if the server is gone."""
        try:
            socket.send_fds(self._requests, [order], streams)
        except OSError:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """Ends the server, and not its forks."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


@atexit.register
def _end_servers() -> None:
    for each in _servers.values():
        each.kill()


class _Control(socket.socket):
    """A supervisor's control socket. Several threads may wait on it: the last holder closes it."""

    def __del__(self) -> None:
        self.close()


class ForkedProcess:
    """A supervisor that a fork server forked, with what the runner needs of `subprocess.Popen`.

    Args:
        server: The server that was asked for it.
        control: Other end of the supervisor's stdin.
        stdout: What the stage prints.
    """

    def __init__(self, server: _Server, control: _Control, stdout: IO[str]) -> None:
        self._server = server
        self._control = control
        self.stdout: IO[str] | None = stdout

    def end(self) -> None:
        """Ends the supervisor's stdin, its sign to end the stage."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code, or minus the signal.

        Raises:
            subprocess.TimeoutExpired: It did not come within ``timeout`` seconds.
        """
        ended = select.poll()
        # No read event: only the end of the supervisor counts.
        ended.register(self._control, 0)
        if not ended.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("stages.harness.fork_server", timeout or 0)
        pid, code = self._answers()
        if code is not None:
            return code
        # The supervisor was killed, or the server ended before it had forked one.
        return EXIT_FAILED if pid is None else -signal.SIGKILL

    def kill(self) -> None:
        """Kills the supervisor, and with it the stage; before there is one, the server.

        An import may hang in the server, as on a file system that does not answer.
        """
        pid, code = self._answers()
        if pid is None:
            self._server.kill()
        elif code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _answers(self) -> tuple[int | None, int | None]:
        """Process id and exit code of the supervisor, as far as they are known."""
        said = b""
        # Left in the socket: several threads read.
        with contextlib.suppress(BlockingIOError):
            said = self._control.recv(PID_BYTES + 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        pid, code = said[:PID_BYTES], said[PID_BYTES:]
        return int.from_bytes(pid, "big") if pid else None, code[0] if code else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.end()
        self.wait()
