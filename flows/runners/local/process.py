"""Stages as subprocesses of this machine, each under its supervisor."""

import contextlib
import subprocess
import sys
import threading

from flows.pipeline.placement import Execution
from flows.pipeline.preflight import require_interpreter
from flows.runners.attempt_log import AttemptLog
from flows.runners.command_lines import (
    SUPERVISOR_SECONDS,
    stage_command,
    stage_environment,
    thread_variables,
)
from flows.runners.ending import Ending
from flows.runners.local.fork_client import ForkedProcess, start_forked
from flows.runners.local.gpus import device_variables, hold_gpus
from flows.runners.place import StageJob, Work, ends_when

# Bytes at the end of a log in which its last lines are looked for.
_TAIL_BYTES = 1 << 16

SupervisedProcess = subprocess.Popen[str] | ForkedProcess


class StageProcess:
    """A stage at work; ``held`` has its process, its GPUs and its log open."""

    title = "a process"

    def __init__(
        self,
        job: StageJob,
        process: SupervisedProcess,
        held: contextlib.ExitStack,
        grace_seconds: float,
    ) -> None:
        self._job = job
        self._process = process
        self._held = held
        self._grace_seconds = grace_seconds
        self._ended = threading.Event()

    def follow(self) -> Ending:
        """See :class:`flows.runners.place.Work`."""
        process = self._process
        assert process.stdout is not None
        with ends_when(self._job.stopping, self._end):
            try:
                for line in process.stdout:
                    self._job.handle_line(line)
                code = process.wait()
            finally:
                self._ended.set()
        _quote_tail(self._job.log)
        # The code is negative if the supervisor itself was killed.
        return Ending("exited", code if code >= 0 else 128 - code)

    def _end(self) -> None:
        """Closes the supervisor's stdin, which tells it to stop the stage."""
        if isinstance(self._process, ForkedProcess):
            self._process.end()
        elif self._process.stdin is not None:
            self._process.stdin.close()
        if not self._ended.wait(self._grace_seconds + SUPERVISOR_SECONDS):
            self._process.kill()

    def remove(self) -> None:
        """See :class:`flows.runners.place.Work`; the supervisor ends with its stdin."""
        self._held.close()


class ProcessPlace:
    """This machine, the default place: needs nothing but the stage's Python environment."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def find(self, job: StageJob) -> None:
        """See :class:`flows.runners.place.Place`: no subprocess outlives its orchestrator."""

    def start(self, job: StageJob) -> Work:
        """See :class:`flows.runners.place.Place`."""
        request = job.request
        execution = self._execution
        interpreter = execution.interpreters.get(request.stage, sys.executable)
        require_interpreter(request.stage, interpreter)
        command = stage_command(request, job.request_path, interpreter, execution.grace_seconds)
        # vLLM forks by itself, and a GPU's work is long.
        gains_by_fork = request.image in ("core", "torch") and not request.resources.gpus
        with contextlib.ExitStack() as stack:
            gpus = stack.enter_context(hold_gpus(request.resources.gpus))
            environment = stage_environment(in_bucket=job.store.mirror_of is not None)
            # A stage that holds no GPU must not see the GPUs of other stages.
            environment |= device_variables(gpus)
            environment |= thread_variables(request.resources)
            # The stage itself writes into the log.
            stderr = stack.enter_context(job.log.path.open("a", encoding="utf-8"))
            process: SupervisedProcess
            if execution.fork_server and gains_by_fork:
                process = start_forked(command, environment, stderr.fileno())
            else:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=environment,
                    pass_fds=tuple(gpus.values()),
                    text=True,
                    errors="replace",
                    # A Ctrl-C reaches the orchestrator, which then stops its stages.
                    start_new_session=True,
                )
            stack.enter_context(process)
            return StageProcess(job, process, stack.pop_all(), execution.grace_seconds)


def _quote_tail(log: AttemptLog) -> None:
    """Keeps the last lines of a log, to which the stage itself has written as well."""
    with log.path.open("rb") as file:
        file.seek(max(0, log.path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    log.lines.clear()
    for line in lines:
        log.quote(line)
