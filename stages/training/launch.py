"""Start of a training by its stage: in this process, or in a worker process for each device.

The first node's stage repeats the first worker's events. As soon as one worker of any node fails,
every node ends all of its own. A training that lacks memory starts again with half the tokens.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from stages.contract.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter
from stages.harness.context import StageContext
from stages.training.job import Job, OutOfMemoryError, P, Process, make_job

if TYPE_CHECKING:
    from stages.training.rendezvous import Rendezvous

GRACE_SECONDS = 5.0
"""Seconds for workers to end after another one failed; they wait in a collective by then."""
JOB_FILE = "job.json"
_LOOK_SECONDS = 0.1

Ending = UserError | StageFailedError | StoppedError


def train(
    ctx: StageContext[P],
    *,
    models: Sequence[str],
    files: Sequence[str],
) -> None:
    """Trains; anew with half the tokens at once if memory did not suffice.

    Args:
        ctx: The stage call.
        models: Names of the inputs that are models, of which the request may lack some.
        files: Names of the inputs that are files.

    Raises:
        UserError: Parameters, models or data are wrong, or memory never suffices.
        StoppedError: SIGTERM came; a checkpoint is saved.
        StageFailedError: A worker failed.
    """
    ctx.telemetry_path("metrics.jsonl")
    job = make_job(ctx, models=models, files=files)
    while True:
        try:
            _train_once(ctx, job)
            return
        except OutOfMemoryError as error:
            # Another node's program has ended with its workers and would not come again.
            if error.smaller is None or ctx.resources.nodes > 1:
                raise
            said, smaller = error.said, error.smaller
        # Memory of the failed attempt is released only now that its exception is gone.
        gc.collect()
        ctx.events.warning(
            f"out of memory ({said}): going on with micro_batch_tokens = {smaller} in place of "
            f"{job.params.micro_batch_tokens}"
        )
        params = job.params.model_copy(update={"micro_batch_tokens": smaller})
        job = job.model_copy(update={"params": params})


def _train_once(ctx: StageContext[P], job: Job[P]) -> None:
    per_node, nodes = ctx.resources.devices, ctx.resources.nodes
    if per_node == nodes == 1 and not ctx.params.needs_workers:
        from stages.training.fit import run_fit

        with ctx.deferred_stop():
            run_fit(job, Process(0, 0, 1, ctx.events, lambda: ctx.stop_requested))
        return
    from stages.training.rendezvous import host_rendezvous

    job_file = job.work / JOB_FILE
    job_file.write_text(json.dumps(job.model_dump(mode="json")))
    with host_rendezvous(
        job.work, address=ctx.resources.rendezvous, num_nodes=nodes, per_node=per_node
    ) as rendezvous:
        if nodes > 1:
            ctx.events.info(
                f"waiting for {nodes - 1} times `python -m stages.training.node {job.work}`"
            )
        run_workers(job_file, rendezvous, ctx.events)


def run_workers(job_file: Path, rendezvous: Rendezvous, events: Emitter) -> None:
    """Starts this node's workers and waits for them; for a process's main thread.

    Raises:
        UserError: A worker found parameters, models or data wrong, or lacked memory.
        StoppedError: SIGTERM came; the workers have saved a checkpoint.
        StageFailedError: A worker failed, here or on another node, or a node did not come.
    """
    failure: Ending | None = None
    try:
        if not rendezvous.meet():
            events.info("training started without need of this node")
            return
        with _stop_asked() as stop:
            workers = [_Worker(job_file, rendezvous, each) for each in range(rendezvous.per_node)]
            try:
                failure = _watch(workers, rendezvous, stop, events)
            finally:
                _end(workers)
    except BaseException as error:
        failure = failure or StageFailedError(str(error) or type(error).__name__)
        raise
    finally:
        rendezvous.close(str(failure or ""))
    if failure is not None:
        raise failure


class _Worker:
    """A worker process of this node, in a session of its own.

    Attributes:
        rank: Its number among the workers of all nodes.
        process: The process.
        connection: What it says; closed once that has an end.
        failure: When and why it failed, if it could say so.
    """

    def __init__(self, job_file: Path, rendezvous: Rendezvous, local_rank: int) -> None:
        self.rank = rendezvous.rank * rendezvous.per_node + local_rank
        self.failure: tuple[float, UserError | StageFailedError] | None = None
        environment = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(rendezvous.world_size),
            "LOCAL_WORLD_SIZE": str(rendezvous.per_node),
            "MASTER_ADDR": rendezvous.host,
            "MASTER_PORT": str(rendezvous.store.port),
        }
        self.connection, other = Pipe(duplex=False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stages.training.worker", str(job_file), str(os.getpid())],
            env=os.environ | environment,
            stdout=other.fileno(),
            start_new_session=True,
        )
        other.close()

    def hear(self, events: Emitter) -> None:
        """Repeats the events that it has sent, and notes why it failed."""
        try:
            while not self.connection.closed and self.connection.poll():
                kind, said = self.connection.recv()
                if kind == "failed":
                    self.failure = said
                else:
                    events.emit(said)
        except (EOFError, OSError):
            self.connection.close()

    def signal(self, number: int) -> None:
        """Sends a signal to it and to what it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def _watch(
    workers: Sequence[_Worker], rendezvous: Rendezvous, stop: threading.Event, events: Emitter
) -> Ending | None:
    """Waits for the end of the workers, and returns why training failed, if it did."""
    stopped = StoppedError("asked to stop (SIGTERM)")
    is_told = False
    while True:
        # Looked at first: what one said that has ended is in its pipe by now.
        codes = [worker.process.poll() for worker in workers]
        for worker in workers:
            worker.hear(events)
        if any(code not in (None, EXIT_OK, EXIT_STOPPED) for code in codes):
            return (
                stopped if stop.is_set() else _first_failure(workers, codes, rendezvous.world_size)
            )
        if None not in codes:
            return stopped if stop.is_set() or EXIT_STOPPED in codes else None
        if (elsewhere := rendezvous.failure()) is not None:
            return stopped if stop.is_set() else StageFailedError(elsewhere)
        if stop.is_set() and not is_told:
            is_told = True
            for worker in workers:
                worker.signal(signal.SIGTERM)
        wait([each.connection for each in workers if not each.connection.closed], _LOOK_SECONDS)


def _end(workers: Sequence[_Worker]) -> None:
    """Ends what is left of the workers."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.process.wait()
        worker.connection.close()


def _first_failure(
    workers: Sequence[_Worker], codes: Sequence[int | None], world_size: int
) -> UserError | StageFailedError:
    """The failure of a worker that failed by itself, rather than one that it dragged along."""
    failures: list[tuple[float, UserError | StageFailedError]] = []
    for worker, code in zip(workers, codes, strict=True):
        if code not in (None, EXIT_OK, EXIT_STOPPED):
            ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            error = StageFailedError(
                f"training process {worker.rank} of {world_size} failed: {ended}"
            )
            # One that was killed had no time to say so; the others then lost their connection.
            failures.append(worker.failure or (0.0, error))
    failures.sort(key=lambda each: (not isinstance(each[1], UserError), each[0]))
    return failures[0][1]


@contextlib.contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """Notes SIGTERM within the block, and puts the handler back that was there before."""
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
