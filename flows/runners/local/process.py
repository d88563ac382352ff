"""Runs a stage as a subprocess of this machine, under its supervisor."""

import contextlib
import subprocess
import threading
from collections.abc import Iterator

from flows.pipeline.placement import Execution, interpreter_of
from flows.pipeline.preflight import require_interpreter
from flows.runners.attempt_log import AttemptLog, new_log, write_request
from flows.runners.base import (
    SUPERVISOR_SECONDS,
    Ending,
    FailureTail,
    OnEvent,
    log_once,
    program_of,
    raise_for,
    supervised,
    thread_variables,
    time_limit,
)
from flows.runners.local.environment import stage_environment
from flows.runners.local.fork_client import ForkedProcess, start_forked
from flows.runners.local.gpus import HeldGpus, hold_gpus
from stages.contract.request import Request
from stages.store.base import Store

# Bytes at the end of a log in which its last lines are looked for.
_TAIL_BYTES = 1 << 16

Process = subprocess.Popen[str] | ForkedProcess


class ProcessRunner:
    """The default runner: needs nothing but the stage's Python environment."""

    name = "process"

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._grace_seconds = execution.grace_seconds
        self._live: set[Process] = set()
        self._changed = threading.Condition()
        self._stopping = threading.Event()

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        path = new_log(request)
        with (
            hold_gpus(
                request.resources.gpus,
                waiting=log_once(on_event),
                stopping=self._stopping,
            ) as gpus,
            path.open("a", encoding="utf-8") as file,
            self._started(request, gpus, file.fileno()) as process,
            time_limit(request.resources.timeout_seconds, lambda: _end(process)) as overdue,
        ):
            log = AttemptLog(path, file)
            assert process.stdout is not None
            for line in process.stdout:
                log.handle_line(line, on_event)
            code = process.wait()
        log.warn_if_incomplete(on_event)
        _read_tail(log)
        # The code is negative if the supervisor itself was killed.
        ending = Ending(
            "overdue" if overdue.is_set() else "exited", code if code >= 0 else 128 - code
        )
        raise_for([ending], [log], request, stopped=self._stopping.is_set())

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._changed:
            self._stopping.set()
            for process in self._live:
                _end(process)
            limit = self._grace_seconds + SUPERVISOR_SECONDS
            if not self._changed.wait_for(lambda: not self._live, limit):
                for process in self._live:
                    process.kill()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`: no subprocess outlives its orchestrator."""
        return False

    @contextlib.contextmanager
    def _started(self, request: Request, gpus: HeldGpus, log: int) -> Iterator[Process]:
        """A stage at work; at the end of the block it is ended and waited for."""
        interpreter = interpreter_of(self._execution.interpreters, request.stage, request.image)
        require_interpreter(request.stage, interpreter)
        program = program_of(request, write_request(request))
        command = supervised(interpreter, self._grace_seconds, program=program)
        environment = _environment(request, gpus)
        # vLLM forks by itself, and a GPU's work is long.
        gains_by_fork = request.image in ("core", "torch") and not request.resources.gpus
        with self._changed:
            process: Process
            if self._execution.fork_server and gains_by_fork:
                process = start_forked(command, environment, log)
            else:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    pass_fds=gpus.descriptors,
                    text=True,
                    errors="replace",
                    # A Ctrl-C reaches the orchestrator, which then stops its stages.
                    start_new_session=True,
                )
            self._live.add(process)
            if self._stopping.is_set():
                _end(process)
        try:
            with process:
                yield process
        finally:
            with self._changed:
                self._live.remove(process)
                self._changed.notify_all()


def _environment(request: Request, gpus: HeldGpus) -> dict[str, str]:
    in_bucket = Store.open(request.store).mirror_of is not None
    # Without one of its own a stage sees no GPU, rather than those of others.
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus.devices)}
    return stage_environment(in_bucket=in_bucket) | devices | thread_variables(request.resources)


def _read_tail(log: FailureTail) -> None:
    """Keeps the last lines of a log, to which the stage itself has written as well."""
    with log.path.open("rb") as file:
        file.seek(max(0, log.path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    log.lines.clear()
    for line in lines:
        log.add_line(line)


def _end(process: Process) -> None:
    """Ends the supervisor's stdin, its sign to end the stage."""
    if isinstance(process, ForkedProcess):
        process.end()
    elif process.stdin is not None:
        process.stdin.close()
