"""One worker process per device, started and watched by the stage's own process.

The first node's stage hosts the rendezvous, so that no port has to be guessed, and repeats the
first worker's events. Every node's own ends all its workers as soon as one of any node fails.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from stages.contract.context import StageContext
from stages.contract.errors import EXIT_OK, EXIT_STOPPED, EXIT_USER, StageFailedError, UserError
from stages.contract.events import Emitter, Failure, parse_event
from stages.train.job import Job
from stages.train.memory import EXIT_OUT_OF_MEMORY, OutOfMemoryError
from stages.train.params import TrainParams
from stages.train.rendezvous import Rendezvous, host_rendezvous

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""How long workers may take to end after another one failed; they wait in a collective by then."""
NODES_POLL_SECONDS = 1.0
"""Time between questions whether another node has failed."""
JOB_FILE = "job.json"


class Watched(Protocol):
    """What is told of the workers, and says whether they shall stop."""

    @property
    def events(self) -> Emitter:
        """Where events go."""
        ...

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM came."""
        ...


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    failure: Failure | None = None
    failed_at: float = math.inf
    ended_by_us: bool = False
    unread: bytes = b""

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


def train_in_workers(job: Job, num_workers: int, ctx: StageContext[TrainParams]) -> None:
    """Trains in ``num_workers`` processes of each node and waits for those of this one.

    Raises:
        UserError: A worker found parameters, models or pairs wrong.
        OutOfMemoryError: A worker's memory did not suffice.
        StoppedError: SIGTERM came; the workers have saved a checkpoint.
        StageFailedError: A worker failed, or a node did not come.
    """
    job_file = job.work / JOB_FILE
    job_file.write_text(job.dump())

    def waiting(nodes: int) -> None:
        ctx.events.info(f"waiting for {nodes} times `python -m stages.train.node {job.work}`")

    with (
        ctx.deferred_stop(),
        host_rendezvous(
            job.work,
            address=ctx.resources.rendezvous,
            num_nodes=ctx.resources.nodes,
            per_node=num_workers,
            waiting=waiting,
            check_stop=ctx.check_stop,
        ) as rendezvous,
    ):
        run_workers(job_file, rendezvous, ctx)
    ctx.check_stop()


def run_workers(job_file: Path, rendezvous: Rendezvous, watched: Watched) -> None:
    """Starts this node's workers and waits for them.

    Raises:
        UserError: A worker found parameters, models or pairs wrong.
        StageFailedError: A worker failed, here or on another node.
    """
    with _workers(job_file, rendezvous) as workers:
        elsewhere = _watch(workers, rendezvous, watched)
    if watched.stop_requested:
        return
    if not any(_failed(worker) for worker in workers):
        return
    try:
        _raise_first_failure(workers, rendezvous.world_size)
    except (StageFailedError, UserError) as error:
        rendezvous.tell_failure(str(error))
        raise
    raise StageFailedError(f"another node failed: {elsewhere}")


@contextlib.contextmanager
def _workers(job_file: Path, rendezvous: Rendezvous) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        for local_rank in range(rendezvous.per_node):
            environment = os.environ | rendezvous.environment(local_rank)
            rank = int(environment["RANK"])
            process = subprocess.Popen(
                [sys.executable, "-m", "stages.train.worker", str(job_file)],
                # Held open by this process: its end tells a worker that this process is gone.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            workers.append(_Worker(rank, process))
        yield workers
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.ended_by_us = True
                worker.process.kill()
            worker.process.wait()
            for stream in (worker.process.stdin, worker.process.stdout):
                assert stream is not None
                stream.close()


def _watch(workers: list[_Worker], rendezvous: Rendezvous, watched: Watched) -> str | None:
    """Repeats events until all workers have ended; passes a wish to stop on.

    Returns:
        What another node said when it failed, if one did.
    """
    told_to_stop = False
    deadline: float | None = None
    elsewhere: str | None = None
    next_question = 0.0
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select(POLL_SECONDS):
                if not _repeat(key.data, watched.events):
                    selector.unregister(key.fileobj)
            if watched.stop_requested and not told_to_stop:
                told_to_stop = True
                for worker in workers:
                    worker.process.send_signal(signal.SIGTERM)
            now = time.monotonic()
            if now >= next_question:
                next_question = now + NODES_POLL_SECONDS
                elsewhere = elsewhere or rendezvous.failure()
            failed = elsewhere is not None or any(_failed(worker) for worker in workers)
            if failed and deadline is None:
                deadline = now + GRACE_SECONDS
            if deadline is not None and now > deadline:
                return elsewhere
    # A worker closes its stdout a moment before it ends.
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(GRACE_SECONDS)
    return elsewhere


def _repeat(worker: _Worker, events: Emitter) -> bool:
    """Reads what a worker printed; returns whether it may print more."""
    data = os.read(worker.stdout.fileno(), 1 << 16)
    *lines, worker.unread = (worker.unread + data).split(b"\n")
    for line in lines:
        event = parse_event(line.decode(errors="replace"))
        if isinstance(event, Failure):
            worker.failure, worker.failed_at = event, time.monotonic()
        elif event is not None:
            events.emit(event)
    return bool(data)


def _failed(worker: _Worker) -> bool:
    return worker.process.poll() not in (None, EXIT_OK)


def _raise_first_failure(workers: list[_Worker], world_size: int) -> None:
    """Raises what the worker that failed by itself said, rather than one that it dragged along."""
    failed = [worker for worker in workers if _failed(worker) and not worker.ended_by_us]
    for worker in failed:
        if worker.process.returncode == EXIT_USER and worker.failure is not None:
            raise UserError(worker.failure.message, worker.failure.remedy)
        if worker.process.returncode == EXIT_OUT_OF_MEMORY:
            said = worker.failure.message if worker.failure else "no message"
            raise OutOfMemoryError(f"process {worker.rank} of {world_size}: {said}")
    # One that was killed had no time to say so; the others then lost their connection to it.
    silent = [worker for worker in failed if worker.failure is None]
    for worker in silent or sorted(failed, key=lambda worker: worker.failed_at):
        said = worker.failure.message if worker.failure else _describe(worker.process.returncode)
        raise StageFailedError(f"training process {worker.rank} of {world_size} failed: {said}")


def _describe(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "asked to stop" if code == EXIT_STOPPED else f"exit code {code}"
