"""Probes and trainings as Slurm jobs."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from flows.pipeline.placement import Execution, SlurmSettings
from flows.runners.choose import make_runner
from flows.runners.runner import Runner
from flows.runners.slurm import client
from stages.contract.events import Event
from stages.contract.request import Request
from stages.store.base import Store
from tests.at_work import AtWork, said
from tests.flows.probes import wait_until

# What the settings of jobs must bring, since they get nothing of this process's environment.
CARRIED = ("PYTHONPATH", "OMP_NUM_THREADS", "PYTHONMALLOC", "GLIBC_TUNABLES", "HF_HUB_OFFLINE")


def settings(**changes: Any) -> SlurmSettings:
    """Settings of the slurm runner, quick to notice."""
    environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
    return SlurmSettings.model_validate({"environment": environment} | changes)


def execution(death: str = "stop", grace_seconds: float = 10, **changes: Any) -> Execution:
    """A run's section `execution`, whose stages are jobs."""
    values = {"runner": "slurm", "slurm": settings(**changes), "grace_seconds": grace_seconds}
    return Execution.model_validate(values | {"on_orchestrator_death": death})


def runner(**changes: Any) -> Runner:
    """A slurm runner."""
    return make_runner(execution(**changes))


def run(request: Request, **changes: Any) -> list[Event]:
    """Runs a stage to its end and returns what it said."""
    heard: list[Event] = []
    chosen = runner(**changes)
    try:
        chosen.run(request, heard.append)
    finally:
        chosen.stop_all()
    return heard


def job_of(work: AtWork) -> str:
    """Number of a stage's job."""
    first = next(each for each in said(work.heard) if each.startswith("job "))
    return first.split()[1].rstrip(":")


def is_over(job: str) -> bool:
    """True once a job has ended."""
    return not any(each.id == job and not each.is_over for each in client.own_jobs())


def take_all_nodes() -> None:
    """Submits a job of the partition whose jobs take main's nodes."""
    options = ["--partition=high", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null"]
    done = client.submit(options, "#!/bin/bash\n")
    assert done.returncode == 0, done.stderr


def work_key(store: Store) -> str:
    """Key of the one probe of a store."""
    [folder] = (store.root / "logs/probe").iterdir()
    return folder.name


@contextlib.contextmanager
def paused(processes: set[psutil.Process]) -> Iterator[None]:
    """No step is made until Slurm tells the stage to end, however long it takes for that."""
    workers = [process for process in processes if not process.children()]
    assert workers
    for worker in workers:
        worker.suspend()
    try:
        yield
        wait_until(lambda: all(is_told_to_end(each) for each in workers))
    finally:
        for each in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


def is_told_to_end(process: psutil.Process) -> bool:
    """True where SIGTERM waits for a process that is stopped, or the process is gone."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return True
    fields = dict(line.split(":", 1) for line in lines)
    return bool(int(fields["ShdPnd"], 16) & 1 << signal.SIGTERM - 1)
