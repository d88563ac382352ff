"""A Slurm cluster: the one that SLURM_CONF names, or one of two nodes on this machine."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from flows.runners.slurm import client
from stages.contract.errors import PreemptedError
from stages.store.locks import exclusive_lock
from tests.at_work import said
from tests.flows.loop import ROOT
from tests.flows.probes import gone, wait_until
from tests.launchers.launcher import Launcher, Mistake
from tests.programs import lacking, run_program

SCRIPTS = ROOT.parent / "shared/cluster/slurm"
CARRIED = ("PYTHONPATH", "OMP_NUM_THREADS", "PYTHONMALLOC", "GLIBC_TUNABLES", "HF_HUB_OFFLINE")


class Slurm(Launcher):
    """Jobs of a cluster."""

    name = "slurm"
    loss = PreemptedError, "was preempted"
    mistake = Mistake({"time_limit": "30-0"}, r"PartitionTimeLimit.*--time=30-0", "sinfo")
    refused = (
        ({"stages": {"evaluate": {"partition": "nix"}}}, {}, "evaluate: Slurm refuses the job"),
        ({"sbatch_options": ["--constraint=h100"]}, {}, "--constraint=h100"),
        ({}, {"train": {"gpus": 9}}, "--gres=gpu:9"),
        ({}, {"train": {"nodes": 99}}, "--nodes=99"),
    )
    waits: ClassVar = {"sbatch_options": ("--begin=now+1hour",)}

    @property
    def environment(self):
        """Environment variables that jobs need: they inherit none of this process."""
        return {name: os.environ[name] for name in CARRIED if name in os.environ}

    def settings(self, request=None, **changes):
        return {"slurm": {"environment": self.environment} | changes}

    def variables(self, values):
        """Settings with these environment variables for a probe."""
        return {"environment": self.environment | values}

    def take_machine(self, work):
        take_all_nodes()

    def await_end(self, request, pids):
        # Also jobs whose folders are gone.
        wait_until(lambda: not any("-test-probe-" in name for name in client.own_jobs()))
        assert all(gone(pid) for pid in pids)

    def left(self, store):
        folder = store.root / "slurm/jobs"
        return [job.name for job in folder.iterdir()] if folder.is_dir() else []


@contextlib.contextmanager
def slurm_launcher():
    """Jobs of the cluster that SLURM_CONF names, or of one of two nodes on this machine.

    Some tests take all nodes, and a machine has room for one cluster of these ports: one session of
    tests waits for the other.
    """
    lock = Path(tempfile.gettempdir()) / "geb-slurm-cluster"
    with exclusive_lock(lock), pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.runners.slurm.work.POLL_SECONDS", 0.5)
        if os.environ.get("SLURM_CONF"):
            yield Slurm()
        else:
            with _own_cluster():
                yield Slurm()


@contextlib.contextmanager
def _own_cluster():
    if not (SCRIPTS / "up").exists():
        lacking(f"no SLURM_CONF in the environment, and no test cluster in {SCRIPTS}")
    # A socket's path may not be long.
    top = Path(tempfile.mkdtemp(prefix="geb-slurm-"))
    # Each node has a network, which a test may cut.
    environment = os.environ | {"SLURM_TOP": str(top), "NETNS": "1"}
    started = run_program(SCRIPTS / "up", env=environment)
    try:
        if started.returncode:
            lacking(f"no Slurm cluster could be started: {started.stderr}")
        _notice_late(top / "etc/slurm.conf")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(top / "etc/slurm.conf"))
            yield
    finally:
        subprocess.run([SCRIPTS / "down"], env=environment, check=False)
        shutil.rmtree(top, ignore_errors=True)


def _notice_late(config):
    """Gives Slurm its usual time until it gives a silent node up, and a preempted job more."""
    text = config.read_text().replace("SlurmdTimeout=20", "SlurmdTimeout=300")
    config.write_text(text.replace("GraceTime=10", "GraceTime=60"))
    environment = os.environ | {"SLURM_CONF": str(config)}
    subprocess.run(["scontrol", "reconfigure"], env=environment, check=True)


def jobs_of(store):
    """Jobs of a store, at work or pending."""
    folder = store.root / "slurm/jobs"
    names = {job.name for job in folder.iterdir()} if folder.is_dir() else set()
    return names & client.own_jobs().keys()


def job_of(work):
    """Number of a stage's job."""
    first = next(line for line in said(work.heard) if line.startswith("job "))
    return first.split()[1].rstrip(":")


def take_all_nodes():
    """Submits a job of the partition whose jobs take main's nodes."""
    options = ["--partition=high", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null"]
    done = client.submit(options, "#!/bin/bash\n")
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def paused(processes):
    """No step is made until Slurm tells the stage to end, however long it takes for that."""
    workers = [process for process in processes if not process.children()]
    assert workers
    for worker in workers:
        worker.suspend()
    try:
        yield
        wait_until(lambda: all(is_told_to_end(worker) for worker in workers))
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()


def is_told_to_end(process):
    """True where SIGTERM waits for a process that is stopped, or the process is gone."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return True
    fields = dict(line.split(":", 1) for line in lines)
    return bool(int(fields["ShdPnd"], 16) & 1 << signal.SIGTERM - 1)
