"""Training on two nodes of a real Slurm cluster, which takes them away, or which lose one."""

import contextlib
import subprocess
from functools import partial

import pytest

from stages.contract.errors import PreemptedError
from tests.at_work import said
from tests.slurm.jobs import job_of, paused, take_all_nodes
from tests.two_nodes import Fault, end, killed, make_inputs, outlives, train, training

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(2400)]


@contextlib.contextmanager
def frozen(_, processes):
    """A fault: all processes of the second node stop, as on a machine that hangs."""
    for process in processes:
        process.suspend()
    yield


@contextlib.contextmanager
def cut_off(_, processes):
    """The second node is off the network."""
    command = ["ip", "-n", "slurm-switch", "link", "set", "node2"]
    subprocess.run([*command, "down"], check=True)
    try:
        yield
        assert end(processes), "behind the cut cable, too"
    finally:
        subprocess.run([*command, "up"], check=True)


@contextlib.contextmanager
def set_down(*_):
    """An administrator takes the second node out of the cluster."""
    change = ["scontrol", "update", "NodeName=node2"]
    subprocess.run([*change, "State=DOWN", "Reason=test"], check=True)
    try:
        yield
    finally:
        # Slurm may have taken a node that answers back by itself.
        subprocess.run([*change, "State=RESUME"], check=False)


@contextlib.contextmanager
def preempted(_, processes):
    """Another job takes both nodes."""
    with paused(processes):
        take_all_nodes()
    yield


@contextlib.contextmanager
def out_of_time(work, processes):
    """The job comes near its time limit: Slurm, which looks twice a minute, tells it so next."""
    with paused(processes):
        change = [f"JobId={job_of(work)}", "EndTime=now+150"]
        subprocess.run(["scontrol", "update", *change], check=True)
    yield


def test_faults_of_a_node_change_no_byte_of_a_two_node_training(launcher, tmp_path, store):
    inputs = make_inputs(tmp_path)
    calm, request = (training(inputs, root, epochs=64) for root in (tmp_path / "calm", store.root))
    runner = partial(launcher.runner, request)
    # Slurm announces a job's time limit 30 seconds and the grace period ahead.
    patient = partial(launcher.runner, request, grace_seconds=120)
    faults = [
        Fault(killed, runner, message="ended by SIGKILL"),
        Fault(frozen, runner, PreemptedError, "lost a node"),
        Fault(cut_off, runner, PreemptedError, "lost a node"),
        Fault(set_down, runner, PreemptedError, "lost a node"),
        Fault(preempted, patient, PreemptedError, "was preempted", saves=True),
        Fault(out_of_time, patient, PreemptedError, "near its time limit", saves=True),
    ]
    heard = []
    undisturbed = train(calm, runner(), heard.append)
    assert any("waiting for 1 times" in line for line in said(heard))
    outlives(request, faults, undisturbed)
