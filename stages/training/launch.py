"""Worker processes of a training on one node, one for each device: started, watched, ended.

The first node's stage repeats the first worker's events. As soon as one worker of any node fails,
every node ends all of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract.context import StageContext
from stages.contract.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter, parse_event
from stages.training.job import Job, P
from stages.training.rendezvous import Rendezvous, host_rendezvous
from stages.training.start import EXIT_OUT_OF_MEMORY, OutOfMemoryError
from stages.training.worker import ERROR_FILE

GRACE_SECONDS = 5.0
"""Seconds for workers to end after another one failed; they wait in a collective by then."""
JOB_FILE = "job.json"
_LOOK_SECONDS = 0.1


def train_in_workers(job: Job[P], num_workers: int, ctx: StageContext[P]) -> None:
    """Trains in ``num_workers`` processes of each node and waits for this node's.

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
    failure: UserError | StageFailedError | StoppedError | None = None
    try:
        if not rendezvous.meet():
            events.info("training started without need of this node")
            return
        with (
            tempfile.TemporaryDirectory(prefix="geb-workers-") as folder,
            _relay(events) as stdout,
            _stop_asked() as stop,
        ):
            workers = _start(job_file, rendezvous, Path(folder), stdout)
            try:
                failure = _watch(workers, rendezvous, stop)
            finally:
                _end(workers)
    finally:
        rendezvous.close(str(failure or ""))
    if failure is not None:
        raise failure


@dataclass(frozen=True)
class _Worker:
    """A worker process.

    Attributes:
        rank: Its number among the workers of all nodes.
        process: The process, in a session of its own.
        error_file: Says why it failed, if it could.
    """

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path

    @property
    def said(self) -> dict[str, Any]:
        """Message, remedy and time of its failure; empty for a worker that was killed."""
        return json.loads(self.error_file.read_text()) if self.error_file.is_file() else {}

    def signal(self, number: int) -> None:
        """Sends a signal to it and to what it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def _start(job_file: Path, rendezvous: Rendezvous, folder: Path, stdout: int) -> list[_Worker]:
    """Starts the workers of this node, which write events to ``stdout``."""
    command = [sys.executable, "-m", "stages.training.worker", str(job_file), str(os.getpid())]
    workers = []
    for local_rank in range(rendezvous.per_node):
        rank = rendezvous.rank * rendezvous.per_node + local_rank
        error_file = folder / f"{local_rank}.json"
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(rendezvous.world_size),
            "LOCAL_WORLD_SIZE": str(rendezvous.per_node),
            "MASTER_ADDR": rendezvous.host,
            "MASTER_PORT": str(rendezvous.store.port),
            ERROR_FILE: str(error_file),
        }
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=stdout, start_new_session=True
        )
        workers.append(_Worker(rank, process, error_file))
    return workers


@contextlib.contextmanager
def _relay(events: Emitter) -> Iterator[int]:
    """Repeats the events that are written to the pipe given, until the block ends."""
    source, target = os.pipe()

    def repeat() -> None:
        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                event = parse_event(line)
                if event is not None:
                    events.emit(event)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield target
    finally:
        os.close(target)
        # What a worker started may outlive it and hold the pipe open.
        thread.join(GRACE_SECONDS)


def _watch(
    workers: Sequence[_Worker], rendezvous: Rendezvous, stop: threading.Event
) -> UserError | StageFailedError | StoppedError | None:
    """Waits for the end of the workers, and returns why training failed, if it did."""
    is_told = False
    elsewhere: str | None = None
    while True:
        codes = {worker.rank: worker.process.poll() for worker in workers}
        failed = [
            worker for worker in workers if codes[worker.rank] not in (None, EXIT_OK, EXIT_STOPPED)
        ]
        if not failed:
            if None not in codes.values():
                break
            elsewhere = rendezvous.failure()
        if failed or elsewhere is not None:
            break
        if stop.is_set() and not is_told:
            is_told = True
            for worker in workers:
                worker.signal(signal.SIGTERM)
        time.sleep(_LOOK_SECONDS)
    if stop.is_set() or (not failed and EXIT_STOPPED in codes.values()):
        return StoppedError("asked to stop (SIGTERM)")
    if elsewhere is not None:
        return StageFailedError(elsewhere)
    return _first_failure(failed, rendezvous.world_size) if failed else None


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


def _first_failure(failed: Sequence[_Worker], world_size: int) -> UserError | StageFailedError:
    """The failure of a worker that failed by itself, rather than one that it dragged along."""
    for worker in failed:
        said = worker.said
        if said and worker.process.returncode == EXIT_USER:
            return UserError(said["message"], said["remedy"])
        if said and worker.process.returncode == EXIT_OUT_OF_MEMORY:
            return OutOfMemoryError(f"process {worker.rank} of {world_size}: {said['message']}")
    # One that was killed had no time to say so; the others then lost their connection to it.
    first = min(failed, key=lambda worker: worker.said.get("failed_at", 0.0))
    reason = first.said.get("message") or _describe(first.process.returncode)
    return StageFailedError(f"training process {first.rank} of {world_size} failed: {reason}")


@contextlib.contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """Notes SIGTERM within the block, and puts the handler back that was there before."""
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
