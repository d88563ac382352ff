"""One worker process per device, started and watched by the stage's own process.

The stage's process hosts the rendezvous, so that no port has to be guessed, repeats the first
worker's events, and ends all workers as soon as one of them fails.
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
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore

from stages.contract.context import StageContext
from stages.contract.errors import EXIT_OK, EXIT_STOPPED, EXIT_USER, StageFailedError, UserError
from stages.contract.events import Failure, parse_event
from stages.train.job import Job
from stages.train.params import TrainParams

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""How long workers may take to end after another one failed; they wait in a collective by then."""
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)


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
    """Trains in ``num_workers`` processes and waits for them.

    Raises:
        UserError: A worker found parameters, models or pairs wrong.
        StoppedError: SIGTERM came; the workers have saved a checkpoint.
        StageFailedError: A worker failed.
    """
    job_file = job.work / "job.json"
    job_file.write_text(job.dump())
    store = TCPStore(
        LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT
    )
    with ctx.deferred_stop(), _workers(job_file, num_workers, store.port) as workers:
        _watch(workers, ctx)
    ctx.check_stop()
    _raise_first_failure(workers)


@contextlib.contextmanager
def _workers(job_file: Path, num_workers: int, port: int) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        for rank in range(num_workers):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_workers),
                "LOCAL_WORLD_SIZE": str(num_workers),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
                # torch then connects to the store of this process in place of making one.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
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


def _watch(workers: list[_Worker], ctx: StageContext[TrainParams]) -> None:
    """Repeats events until all workers have ended; passes a wish to stop on."""
    told_to_stop = False
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
        while selector.get_map():
            for key, _ in selector.select(POLL_SECONDS):
                if not _repeat(key.data, ctx):
                    selector.unregister(key.fileobj)
            if ctx.stop_requested and not told_to_stop:
                told_to_stop = True
                for worker in workers:
                    worker.process.send_signal(signal.SIGTERM)
            if deadline is None and any(_failed(worker) for worker in workers):
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                return
    # A worker closes its stdout a moment before it ends.
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(GRACE_SECONDS)


def _repeat(worker: _Worker, ctx: StageContext[TrainParams]) -> bool:
    """Reads what a worker printed; returns whether it may print more."""
    data = os.read(worker.stdout.fileno(), 1 << 16)
    *lines, worker.unread = (worker.unread + data).split(b"\n")
    for line in lines:
        event = parse_event(line.decode(errors="replace"))
        if isinstance(event, Failure):
            worker.failure, worker.failed_at = event, time.monotonic()
        elif event is not None:
            ctx.events.emit(event)
    return bool(data)


def _failed(worker: _Worker) -> bool:
    return worker.process.poll() not in (None, EXIT_OK)


def _raise_first_failure(workers: list[_Worker]) -> None:
    """Raises what the worker that failed by itself said, rather than one that it dragged along."""
    failed = [worker for worker in workers if _failed(worker) and not worker.ended_by_us]
    for worker in failed:
        if worker.process.returncode == EXIT_USER and worker.failure is not None:
            raise UserError(worker.failure.message, worker.failure.remedy)
    # One that was killed had no time to say so; the others then lost their connection to it.
    silent = [worker for worker in failed if worker.failure is None]
    for worker in silent or sorted(failed, key=lambda worker: worker.failed_at):
        said = worker.failure.message if worker.failure else _describe(worker.process.returncode)
        raise StageFailedError(f"training process {worker.rank} of {len(workers)} failed: {said}")


def _describe(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "asked to stop" if code == EXIT_STOPPED else f"exit code {code}"
