"""A Slurm cluster: the one that SLURM_CONF names, or one of two nodes on this machine."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.runners.slurm import client, submission
from stages.store.base import Store
from stages.store.locks import exclusive_lock
from tests.flows.loop import ROOT
from tests.lacking import lacking
from tests.programs import run_program

SCRIPTS = ROOT.parent / "shared/cluster/slurm"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster that Slurm's commands reach by SLURM_CONF, for one module at a time.

    Some tests take all nodes, and a machine has room for one cluster of these ports.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with exclusive_lock(shared / "slurm"):
        if os.environ.get("SLURM_CONF"):
            yield
        else:
            yield from _own_cluster()


def _own_cluster() -> Iterator[None]:
    if not (SCRIPTS / "up").exists():
        lacking(f"no SLURM_CONF in the environment, and no test cluster in {SCRIPTS}")
    # A socket's path may not be long.
    top = Path(tempfile.mkdtemp(prefix="geb-slurm-"))
    # Each node in a network of its own, which a test may cut.
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


def _notice_late(config: Path) -> None:
    """Gives Slurm its usual time until it gives a silent node up; the scripts ask for 20 s."""
    config.write_text(config.read_text().replace("SlurmdTimeout=20", "SlurmdTimeout=300"))
    environment = os.environ | {"SLURM_CONF": str(config)}
    subprocess.run(["scontrol", "reconfigure"], env=environment, check=True)


@pytest.fixture
def store(store: Store, probe_stage: None, cluster: None) -> Iterator[Store]:
    """A store, for probes as jobs; none of its jobs may be left after the test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "POLL_SECONDS", 0.5)
        yield store
    assert jobs_of(store) == []


def jobs_of(store: Store) -> list[client.QueuedJob]:
    """Jobs of a store, at work or pending."""
    folder = store.root / "slurm/jobs"
    names = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
    return [job for job in client.own_jobs() if job.name in names and not job.is_over]
