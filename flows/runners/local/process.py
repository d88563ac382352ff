"""Stages as subprocesses of this machine, each under its supervisor."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.pipeline.placement import Execution, interpreter_of
from flows.pipeline.preflight import require_interpreter
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import (
    SUPERVISOR_SECONDS,
    Ending,
    FailureTail,
    OnEvent,
    log_once,
    program_of,
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


@dataclass(frozen=True)
class StageProcess:
    """A stage at work, and the GPUs and the log that it holds."""

    process: Process
    held: contextlib.ExitStack
    ended: threading.Event = field(default_factory=threading.Event)
    title: str = "a process"
    num_nodes: int = 1

    def end(self) -> None:
        """Closes the supervisor's stdin, which tells it to stop the stage."""
        if isinstance(self.process, ForkedProcess):
            self.process.end()
        elif self.process.stdin is not None:
            self.process.stdin.close()


class ProcessPlace:
    """This machine, the default place: needs nothing but the stage's Python environment."""

    name = "process"

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> None:
        """See :class:`flows.runners.place.Place`: no subprocess outlives its orchestrator."""

    def submit(
        self, request: Request, log: Path, on_event: OnEvent, stopping: threading.Event
    ) -> StageProcess:
        """See :class:`flows.runners.place.Place`."""
        interpreter = interpreter_of(self._execution.interpreters, request.stage, request.image)
        require_interpreter(request.stage, interpreter)
        program = program_of(request, write_request(request))
        command = supervised(interpreter, self._execution.grace_seconds, program=program)
        # vLLM forks by itself, and a GPU's work is long.
        gains_by_fork = request.image in ("core", "torch") and not request.resources.gpus
        with contextlib.ExitStack() as stack:
            gpus = stack.enter_context(
                hold_gpus(request.resources.gpus, waiting=log_once(on_event), stopping=stopping)
            )
            environment = _environment(request, gpus)
            # The stage itself writes into the log.
            stderr = stack.enter_context(log.open("a", encoding="utf-8"))
            process: Process
            if self._execution.fork_server and gains_by_fork:
                process = start_forked(command, environment, stderr.fileno())
            else:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=environment,
                    pass_fds=gpus.descriptors,
                    text=True,
                    errors="replace",
                    # A Ctrl-C reaches the orchestrator, which then stops its stages.
                    start_new_session=True,
                )
            stack.enter_context(process)
            return StageProcess(process, stack.pop_all())

    def follow(
        self,
        work: StageProcess,
        request: Request,
        logs: Sequence[AttemptLog],
        on_event: OnEvent,
        stopping: threading.Event,
        check_owner: Callable[[], None],
    ) -> list[Ending]:
        """See :class:`flows.runners.place.Place`."""
        [log] = logs
        process = work.process
        assert process.stdout is not None
        try:
            with time_limit(request.resources.timeout_seconds, work.end) as overdue:
                for line in process.stdout:
                    log.handle_line(line, on_event)
                code = process.wait()
        finally:
            work.ended.set()
        _read_tail(log)
        # The code is negative if the supervisor itself was killed.
        code = code if code >= 0 else 128 - code
        return [Ending("overdue" if overdue.is_set() else "exited", code)]

    def end(self, works: Sequence[StageProcess]) -> None:
        """See :class:`flows.runners.place.Place`."""
        for work in works:
            work.end()
        deadline = time.monotonic() + self._execution.grace_seconds + SUPERVISOR_SECONDS
        for work in works:
            if not work.ended.wait(max(0.0, deadline - time.monotonic())):
                work.process.kill()

    def close(self, work: StageProcess) -> None:
        """See :class:`flows.runners.place.Place`."""
        work.held.close()


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
