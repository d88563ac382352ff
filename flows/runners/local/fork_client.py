"""Stages started by a fork server, for the process runner.

One server is kept per interpreter and environment, for as long as this process lives, so that the
runs of a sweep share it. See :mod:`stages.contract.fork_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from stages.contract.errors import EXIT_FAILED
from stages.contract.fork_server import INTEGER_BYTES, PACKET_BYTES

_KEPT_SERVERS = 3
"""Servers kept at a time; each holds a few hundred MiB of libraries."""
_servers: OrderedDict[tuple[object, ...], _Server] = OrderedDict()
_lock = threading.Lock()


def start_forked(
    interpreter: str,
    environment: Mapping[str, str],
    program: list[str],
    grace_seconds: float,
    left_log: Path,
) -> ForkedProcess:
    """Starts a stage and its supervisor as forks; returns before its libraries are loaded.

    Args:
        interpreter: Path of the stage's Python.
        environment: All environment variables.
        program: Module and arguments.
        grace_seconds: Time between SIGTERM and SIGKILL.
        left_log: File for the output that nobody reads after this process's death.

    Raises:
        OSError: The interpreter cannot be started.
    """
    streams = _Streams()
    with streams:
        order = {
            "program": program,
            "grace_seconds": grace_seconds,
            "left_log": str(left_log),
            "reader": os.getpid(),
        }
        packet = json.dumps(order).encode()
        if len(packet) > PACKET_BYTES:
            raise OSError(f"a command line of {len(packet)} bytes is too long")
        key = (interpreter, str(Path.cwd()), tuple(sorted(environment.items())))
        with _lock:
            server = _servers.pop(key, None)
            if server is None or not server.send(packet, streams.theirs):
                server = _Server(interpreter, environment, errors=streams.theirs[2])
                if not server.send(packet, streams.theirs):
                    # It ended at once, and said why: the start fails, the next one tries again.
                    return ForkedProcess(server, *streams.ours())
            _servers[key] = server
            while len(_servers) > _KEPT_SERVERS:
                _servers.popitem(last=False)[1].close()
        return ForkedProcess(server, *streams.ours())


class _Streams:
    """The two ends of a start's stdin, stdout, stderr and socket of answers."""

    def __init__(self) -> None:
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        mine, its = socket.socketpair()
        self._ours = [stdin[1], stdout[0], stderr[0], mine.detach()]
        self.theirs = [stdin[0], stdout[1], stderr[1], its.detach()]
        """Descriptors that the forks get."""

    def ours(self) -> tuple[int, int, int, int]:
        """Descriptors that are the caller's to close from now on."""
        stdin, stdout, stderr, answers = self._ours
        self._ours = []
        return stdin, stdout, stderr, answers

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        for each in (*self._ours, *self.theirs):
            os.close(each)


class _Server:
    """A running fork server."""

    def __init__(self, interpreter: str, environment: Mapping[str, str], *, errors: int) -> None:
        self._requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._process = subprocess.Popen(
                [interpreter, "-m", "stages.contract.fork_server"],
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=dict(environment),
                # A Ctrl-C in the terminal reaches the orchestrator, which then stops its stages.
                start_new_session=True,
            )

    def send(self, packet: bytes, descriptors: list[int]) -> bool:
        """Asks for a start; False where the server is gone."""
        if self._requests.fileno() < 0:
            # Killed because the start of a stage hung in it.
            return False
        try:
            socket.send_fds(self._requests, [packet], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self.close()
            return False
        return True

    def close(self) -> None:
        """End of new starts: the server exits once the stages that it has forked are over."""
        self._requests.close()
        threading.Thread(target=self._process.wait, daemon=True).start()

    def kill(self) -> None:
        """Ends the server, and not its forks."""
        self._requests.close()
        self._process.kill()
        self._process.wait()


@atexit.register
def _close_servers() -> None:
    with _lock:
        while _servers:
            _servers.popitem()[1].kill()


class ForkedProcess:
    """A supervisor that a fork server forked, with what the runner needs of `subprocess.Popen`.

    Args:
        server: The server that was asked for it.
        stdin: Descriptor to write to.
        stdout: Descriptor to read from.
        stderr: Descriptor to read from.
        answers: Descriptor from which the process id and the exit code are read.
    """

    def __init__(self, server: _Server, stdin: int, stdout: int, stderr: int, answers: int) -> None:
        self._server = server
        self.stdin: IO[str] | None = os.fdopen(stdin, "w", encoding="utf-8")
        self.stdout: IO[str] | None = os.fdopen(stdout, encoding="utf-8", errors="replace")
        self.stderr: IO[str] | None = os.fdopen(stderr, encoding="utf-8", errors="replace")
        self._pid: int | None = None
        self._code: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while the process runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code.

        Raises:
            subprocess.TimeoutExpired: It did not come within ``timeout`` seconds.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("stages.contract.fork_server", timeout or 0)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        """Kills the supervisor, and with it the stage; before there is one, the server.

        An import may hang in the server, as on a file system that does not answer.
        """
        if self._code is not None:
            return
        if self._pid is None:
            self._server.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()

    def _listen(self, answers: int) -> None:
        with socket.socket(fileno=answers) as source:
            pid = source.recv(INTEGER_BYTES, socket.MSG_WAITALL)
            if pid:
                self._pid = int.from_bytes(pid, "big")
            code = source.recv(INTEGER_BYTES, socket.MSG_WAITALL)
        if code:
            self._code = int.from_bytes(code, "big")
        else:
            # The supervisor was killed, or the server ended before it had forked one.
            self._code = -signal.SIGKILL if pid else EXIT_FAILED
        self._ended.set()
