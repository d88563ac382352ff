"""Runs a stage as a subprocess of this machine, under its supervisor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from flows.pipeline.placement import interpreter_of
from flows.pipeline.preflight import require_interpreter
from flows.runners.attempt_log import AttemptLog, new_log, write_request
from flows.runners.base import FailureTail, OnEvent, log_once, supervised, thread_variables
from flows.runners.local.environment import stage_environment
from flows.runners.local.fork_client import ForkedProcess, start_forked
from flows.runners.local.gpu_locks import HeldGpus, hold_gpus
from flows.runners.local.memory import MemoryWatch
from stages.contract.local_store import LocalStore
from stages.contract.request import Request

# A stage is killed after its grace period; the supervisor needs a moment to see that through.
_SUPERVISOR_SECONDS = 10.0
# To read the rest of a log once its stage has ended.
_LEFTOVER_SECONDS = 10.0


Process = subprocess.Popen[str] | ForkedProcess


class ProcessRunner:
    """The default runner: needs nothing but the stage's Python environment.

    Args:
        interpreters: Python interpreter of a stage where it is not this one (vLLM has its own).
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.
        fork_server: Whether stages without a GPU start as forks of a process that has loaded their
            libraries.
    """

    name = "process"

    def __init__(
        self,
        interpreters: Mapping[str, str] | None = None,
        grace_seconds: float = 30.0,
        *,
        fork_server: bool = True,
    ) -> None:
        self._interpreters = dict(interpreters or {})
        self._grace_seconds = grace_seconds
        self._fork_server = fork_server
        self._live: set[Process] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        log = new_log(request)
        tail, memory = FailureTail(), MemoryWatch()
        with (
            hold_gpus(
                request.resources.gpus,
                waiting=log_once(on_event),
                stopping=self._stopping,
            ) as gpus,
            log.open("w", encoding="utf-8") as file,
            self._start(request, gpus, log) as process,
            _logged_stderr(process, log_file := AttemptLog(file, tail)),
            _ended_by_an_error(process),
        ):
            overdue = threading.Event()
            timer = self._start_timer(process, request.resources.timeout_seconds, overdue)
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    log_file.handle_line(line, on_event)
                code = process.wait()
            finally:
                timer.cancel()
                with self._lock:
                    self._live.remove(process)
        log_file.warn_if_incomplete(log, on_event)
        if overdue.is_set():
            tail.raise_overdue(request, str(log))
        tail.raise_for(
            # Negative where the supervisor itself was killed.
            code if code >= 0 else 128 - code,
            request,
            stopped=self._stopping.is_set(),
            log=str(log),
            of_memory=memory.verdict,
        )

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._lock:
            self._stopping.set()
            live = list(self._live)
        for process in live:
            _close_stdin(process)
        for process in live:
            try:
                process.wait(self._grace_seconds + _SUPERVISOR_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`: no subprocess outlives its orchestrator."""
        return False

    def _start(self, request: Request, gpus: HeldGpus, log: Path) -> Process:
        interpreter = interpreter_of(self._interpreters, request.stage, request.image)
        require_interpreter(request.stage, interpreter)
        program = [f"stages.{request.stage}", write_request(request)]
        environment = _environment(request, gpus)
        with self._lock:
            process: Process
            if self._fork_server and _gains_by_fork(request):
                process = start_forked(interpreter, environment, program, self._grace_seconds, log)
            else:
                process = subprocess.Popen(
                    supervised(
                        interpreter,
                        self._grace_seconds,
                        *("--left-log", str(log), "--reader", str(os.getpid())),
                        program=program,
                    ),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    pass_fds=gpus.descriptors,
                    text=True,
                    errors="replace",
                    # A Ctrl-C reaches the orchestrator, which then stops its stages.
                    start_new_session=True,
                )
            self._live.add(process)
            if self._stopping.is_set():
                _close_stdin(process)
        return process

    @staticmethod
    def _start_timer(
        process: Process, seconds: float | None, overdue: threading.Event
    ) -> threading.Timer:
        def end() -> None:
            overdue.set()
            _close_stdin(process)

        timer = threading.Timer(seconds or threading.TIMEOUT_MAX, end)
        timer.daemon = True
        if seconds is not None:
            timer.start()
        return timer


def _gains_by_fork(request: Request) -> bool:
    """True for stages that a fork server serves: vLLM forks by itself, and a GPU's work is long."""
    return request.image in ("core", "torch") and not request.resources.gpus


def _environment(request: Request, gpus: HeldGpus) -> dict[str, str]:
    in_bucket = LocalStore.open(request.store).mirror_of is not None
    # Without one of its own a stage sees no GPU, rather than those of others.
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.devices)}
    return stage_environment(in_bucket=in_bucket) | devices | thread_variables(request.resources)


@contextlib.contextmanager
def _logged_stderr(process: Process, log: AttemptLog) -> Iterator[None]:
    """Writes the stage's stderr to the log in a thread, which ends before the log is closed.

    A process that the stage started, and that outlives its supervisor as well (which was killed),
    may hold the pipe open for ever: it is not waited for.
    """
    # Popen would wait for the thread to close the pipe.
    stderr, process.stderr = process.stderr, None
    assert stderr is not None

    def read() -> None:
        with stderr:
            log.write_all(stderr)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        if process.poll() is None:
            process.wait()
        reader.join(_LEFTOVER_SECONDS)
        log.end()


@contextlib.contextmanager
def _ended_by_an_error(process: Process) -> Iterator[None]:
    """Ends the stage when its events cannot be listened to any more (a signal, a listener's error).

    Popen itself would wait for the reader of stderr, and that one for the stage.
    """
    try:
        yield
    except BaseException:
        _close_stdin(process)
        raise


def _close_stdin(process: Process) -> None:
    """Closes the supervisor's stdin, its sign to end the stage."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
