"""One worker process per device, started and watched by torch's elastic agent.

The first node's stage hosts the rendezvous, so that no port has to be guessed, and repeats the
first worker's events. Every node's agent ends all its workers as soon as one of any node fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

from stages.contract.context import StageContext
from stages.contract.errors import EXIT_OK, EXIT_USER, StageFailedError, StoppedError, UserError
from stages.contract.events import Emitter, parse_event
from stages.training.fence import Fence
from stages.training.job import Job, P
from stages.training.rendezvous import TIMEOUT_SECONDS, Rendezvous, host_rendezvous
from stages.training.start import EXIT_OUT_OF_MEMORY, OutOfMemoryError

GRACE_SECONDS = 5
"""Seconds for workers to end after another one failed; they wait in a collective by then."""
SAVING_SECONDS = 24 * 3600
"""Seconds for workers to save after SIGTERM; the orchestrator's grace period ends sooner."""
JOB_FILE = "job.json"
_END = "end of events\n"


def train_in_workers(job: Job[P], num_workers: int, ctx: StageContext[P]) -> None:
    """Trains in ``num_workers`` processes of each node and waits for those of this one.

    Raises:
        UserError: A worker found parameters, models or data wrong.
        OutOfMemoryError: A worker's memory did not suffice.
        StoppedError: SIGTERM came; the workers have saved a checkpoint.
        StageFailedError: A worker failed, or a node did not come.
    """
    job_file = job.work / JOB_FILE
    job_file.write_text(job.dump())
    nodes = ctx.resources.nodes
    with host_rendezvous(
        job.work, address=ctx.resources.rendezvous, num_nodes=nodes, per_node=num_workers
    ) as rendezvous:
        if nodes > 1:
            ctx.events.info(
                f"waiting for {nodes - 1} times `python -m stages.training.node {job.work}`"
            )
        run_workers(job_file, rendezvous, ctx.events)


def run_workers(job_file: Path, rendezvous: Rendezvous, events: Emitter) -> None:
    """Starts this node's workers and waits for them; for a process's main thread.

    Raises:
        UserError: A worker found parameters, models or data wrong.
        OutOfMemoryError: A worker's memory did not suffice.
        StoppedError: SIGTERM came; the workers have saved a checkpoint.
        StageFailedError: A worker failed, here or on another node, or a node did not come.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix="geb-workers-") as folder,
            _relay(events) as stdout,
            _own_signal_handlers(),
        ):
            agent = _Agent(job_file, rendezvous, _Logs(folder, stdout), Fence(events))
            result = agent.run()
    except SignalException as error:
        raise StoppedError("asked to stop (SIGTERM)") from error
    except RendezvousTimeoutError as error:
        raise StageFailedError(
            f"fewer than {rendezvous.num_nodes} nodes came in {TIMEOUT_SECONDS:g} s; start "
            "`python -m stages.training.node WORK` on each other one, with this stage's work folder"
        ) from error
    except RendezvousError as error:
        raise StageFailedError(f"the rendezvous of the nodes failed: {error}") from error
    else:
        if result is None:
            events.info("training ended without need of this node")
        elif result.is_failed():
            failure = agent.first_failure(result)
            rendezvous.tell_failure(str(failure))
            raise failure
    finally:
        rendezvous.close()


class _Agent(LocalElasticAgent):
    """torch's agent, quicker where a worker fails and aware of other nodes' failures.

    torch's own waits 30 seconds for the others' end, and never asks how other nodes are.
    """

    def __init__(
        self, job_file: Path, rendezvous: Rendezvous, logs: DefaultLogsSpecs, fence: Fence
    ) -> None:
        self._rendezvous_of_nodes = rendezvous
        self._fence = fence
        self._culprits: set[int] = set()
        self._failed_elsewhere = ""
        spec = WorkerSpec(
            role="trainer",
            local_world_size=rendezvous.per_node,
            entrypoint=sys.executable,
            args=("-m", "stages.training.worker", str(job_file), str(os.getpid())),
            rdzv_handler=rendezvous.handler,
            # Retries are the orchestrator's.
            max_restarts=0,
            monitor_interval=0.1,
            master_addr=rendezvous.host,
            master_port=rendezvous.store.port,
        )
        super().__init__(spec, logs, shutdown_timeout=SAVING_SECONDS)

    def first_failure(self, result: RunResult) -> UserError | StageFailedError:
        """The failure of a worker that failed by itself, rather than one that it dragged along."""
        if not self._culprits:
            return StageFailedError(self._failed_elsewhere)
        world_size = self._rendezvous_of_nodes.world_size
        failed = {
            rank: failure
            for rank, failure in result.failures.items()
            if failure.local_rank in self._culprits
        }
        for rank, failure in failed.items():
            if failure.exitcode == EXIT_USER and _said(failure):
                return UserError(_said(failure), failure.error_file_data["remedy"])
            if failure.exitcode == EXIT_OUT_OF_MEMORY:
                return OutOfMemoryError(f"process {rank} of {world_size}: {_said(failure)}")
        # One that was killed had no time to say so; the others then lost their connection to it.
        rank, failure = min(failed.items(), key=lambda each: _failed_at(each[1]))
        said = _said(failure) or _describe(failure.exitcode)
        return StageFailedError(f"training process {rank} of {world_size} failed: {said}")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context: Any = self._pcontext
        ended = {rank: each.proc.poll() for rank, each in context.subprocess_handlers.items()}
        self._culprits = {rank for rank, code in ended.items() if code not in (None, EXIT_OK)}
        with self._fence:
            self._failed_elsewhere = self._rendezvous_of_nodes.failure() or ""
        if self._culprits or self._failed_elsewhere:
            context.close(signal.SIGTERM, GRACE_SECONDS)
        if self._failed_elsewhere and not self._culprits:
            return RunResult(state=WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        # A second SIGTERM must not interrupt the saving after the first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super()._shutdown(*args, **kwargs)


class _Logs(DefaultLogsSpecs):
    """Workers' stdout into a pipe; stderr is this process's.

    Args:
        folder: For the files in which workers say why they failed.
        stdout: Path by which the pipe is opened for writing.
    """

    def __init__(self, folder: str, stdout: str) -> None:
        super().__init__(folder)
        self._stdout = stdout

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Places of each worker's output, by local rank."""
        places = super().reify(envs)
        places.stdouts.update(dict.fromkeys(envs, self._stdout))
        return places


@contextlib.contextmanager
def _relay(events: Emitter) -> Iterator[str]:
    """Repeats the events that are written to the path given, until the block ends."""
    source, target = os.pipe()

    def repeat() -> None:
        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line == _END:
                    return
                event = parse_event(line)
                if event is not None:
                    events.emit(event)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield f"/proc/self/fd/{target}"
    finally:
        # The agent keeps its own handles open, so that an end of file would not come. A worker that
        # was killed may have left half a line.
        os.write(target, f"\n{_END}".encode())
        thread.join()
        os.close(target)


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Lets the agent answer SIGTERM, and puts the handler back that was there before."""
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM"
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _said(failure: ProcessFailure) -> str:
    """Reason that a worker wrote before it ended, if it could."""
    return failure.error_file_data["message"] if "failed_at" in failure.error_file_data else ""


def _failed_at(failure: ProcessFailure) -> float:
    return failure.error_file_data.get("failed_at", 0.0)


def _describe(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
