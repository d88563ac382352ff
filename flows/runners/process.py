"""Runs a stage as a subprocess of this machine, under its supervisor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from flows.runners.base import LastWords, OnEvent
from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Log, parse_event
from stages.contract.request import Request
from stages.contract.store import Store

# A stage is killed after its grace period; the supervisor needs a moment to see that through.
_SUPERVISOR_SECONDS = 10.0


class ProcessRunner:
    """The default runner: needs nothing but the stage's Python environment.

    Args:
        interpreters: Python interpreter of a stage where it is not this one (vLLM has its own).
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.
    """

    name = "process"

    def __init__(
        self, interpreters: Mapping[str, str] | None = None, grace_seconds: float = 30.0
    ) -> None:
        self._interpreters = dict(interpreters or {})
        self._grace_seconds = grace_seconds
        self._live: dict[int, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()
        self._stopping = False

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        folder = Store.open(request.store).log_path(request.stage, request.key)
        folder.mkdir(parents=True, exist_ok=True)
        stem = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}-{threading.get_ident() % 10**6}"
        log = folder / f"{stem}.log"
        words = LastWords()
        with log.open("w", encoding="utf-8") as file, self._start(request) as process:
            log_file = _Log(file, words)
            overdue = threading.Event()
            timer = self._start_timer(process, request.resources.timeout_seconds, overdue)
            reader = threading.Thread(target=log_file.copy, args=(process.stderr,))
            reader.start()
            assert process.stdout is not None
            for line in process.stdout:
                event = parse_event(line)
                if event is None:
                    log_file.keep(line)
                    continue
                if isinstance(event, Log):
                    log_file.keep(f"[{event.level}] {event.message}\n")
                words.hear(event)
                on_event(event)
            code = process.wait()
            reader.join()
            timer.cancel()
            if log_file.error is not None:
                message = f"the log {log} is not whole: {log_file.error.strerror}"
                on_event(Log(level="warning", message=message))
            with self._lock:
                del self._live[process.pid]
        if overdue.is_set():
            raise StageFailedError(
                f"{request.step or request.stage}: took longer than timeout_seconds="
                f"{request.resources.timeout_seconds:g}; log: {log}",
                tuple(words.lines),
            )
        words.raise_for(code, request, stopped=self._stopping, log=str(log))

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._lock:
            self._stopping = True
            live = list(self._live.values())
        for process in live:
            _let_go(process)
        for process in live:
            try:
                process.wait(self._grace_seconds + _SUPERVISOR_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, request: Request) -> subprocess.Popen[str]:
        interpreter = self._interpreters.get(request.stage, sys.executable)
        if not Path(interpreter).exists():
            raise UserError(
                f"no Python interpreter at {interpreter} for stage {request.stage!r}",
                "run `make setup-vllm`, or correct execution.interpreters",
            )
        with self._lock:
            process = subprocess.Popen(
                [
                    *(interpreter, "-m", "stages.contract.supervisor"),
                    *("--grace", str(self._grace_seconds), "--"),
                    *(interpreter, "-m", f"stages.{request.stage}", _written(request)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(request),
                text=True,
                errors="replace",
                # A Ctrl-C in the terminal reaches the orchestrator, which then stops its stages.
                start_new_session=True,
            )
            self._live[process.pid] = process
            if self._stopping:
                _let_go(process)
        return process

    @staticmethod
    def _start_timer(
        process: subprocess.Popen[str], seconds: float | None, overdue: threading.Event
    ) -> threading.Timer:
        def end() -> None:
            overdue.set()
            _let_go(process)

        timer = threading.Timer(seconds or threading.TIMEOUT_MAX, end)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        return timer


def _written(request: Request) -> str:
    """Writes the request where the stage's folder of logs keeps it and returns its path."""
    folder = Store.open(request.store).log_path(request.stage, request.key)
    descriptor, name = tempfile.mkstemp(prefix="request-", suffix=".json", dir=folder)
    os.close(descriptor)
    request.write(Path(name))
    return name


def _environment(request: Request) -> dict[str, str]:
    environment = dict(os.environ)
    if request.resources.cpus is not None:
        threads = str(max(1, int(request.resources.cpus)))
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    # The stage's own environment must not resolve packages of the orchestrator's.
    environment.pop("VIRTUAL_ENV", None)
    return environment


class _Log:
    """The log of one attempt. It goes on listening when its disk is full: the stage must not block.

    Args:
        file: Where the lines go.
        words: Remembers the last of them.
    """

    def __init__(self, file: IO[str], words: LastWords) -> None:
        self._file = file
        self._words = words
        self.error: OSError | None = None

    def keep(self, line: str) -> None:
        self._words.lines.append(line.rstrip("\n"))
        if self.error is None:
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                self.error = error

    def copy(self, stream: IO[str]) -> None:
        for line in stream:
            self.keep(line)


def _let_go(process: subprocess.Popen[str]) -> None:
    """Closes the supervisor's stdin, its sign to end the stage."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
