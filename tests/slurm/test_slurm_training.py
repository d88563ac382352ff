"""Training on two nodes of a real Slurm cluster."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stages.contract.errors import PreemptedError, StageFailedError
from stages.contract.local_store import LocalStore
from stages.contract.request import Request
from tests.at_work import AtWork, at_work, said
from tests.flows.probes import wait_until
from tests.slurm.jobs import (
    job_of,
    run,
    runner,
    take_all_nodes,
)
from tests.stages.train.train_helpers import make_pairs
from tests.stages.train.train_helpers import request_for as train_request
from tests.tiny_models import make_tiny_llama
from tests.two_nodes import (
    end,
    first_step,
    is_under_way,
    processes_of_second_node,
    tell,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(2400)]


def trains_on_two_nodes(store: Path, policy: Path, pairs: Path) -> Request:
    """A training of some seconds, under ZeRO-2 on gloo, in a store of its own."""
    request = train_request(
        store,
        policy,
        [pairs],
        nodes=2,
        epochs=12,
        micro_batch_tokens=16,
        checkpoint_every_steps=4,
        deepspeed={"zero_stage": 2},
    )
    return request.model_copy(update={"run": "test", "step": "train"})


def kill(processes: set[psutil.Process]) -> None:
    """Kills what runs on the second node."""
    for each in processes:
        each.kill()


def freeze(processes: set[psutil.Process]) -> None:
    """Stops what runs on the second node, as a machine that hangs does."""
    for each in processes:
        each.suspend()


def cut_off(_: object) -> None:
    """Takes the second node off the network."""
    set_link("down")


def set_link(state: str) -> None:
    """Sets the second node's network link ``up`` or ``down``."""
    subprocess.run(["ip", "-n", "slurm-switch", "link", "set", "node2", state], check=True)


def disturb(
    request: Request, way: Callable[[set[psutil.Process]], None]
) -> tuple[BaseException | None, set[psutil.Process]]:
    """Disturbs a training's second node; returns the error, and what ran on that node."""
    started = time.monotonic()
    with at_work(request, runner(), is_under_way) as work:
        went_on = time.monotonic()
        processes = processes_of_second_node(request)
        assert processes
        way(processes)
        error = work.join()
        ended = time.monotonic()
    tell(way.__name__, went_on - started, ended - went_on)
    return error, processes


@contextlib.contextmanager
def paused(request: Request) -> Iterator[None]:
    """No step is made until Slurm tells the stage to end, however long it takes for that."""
    workers = [each for each in processes_of_second_node(request) if not each.children()]
    assert workers
    for each in workers:
        each.suspend()
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


def preempted(_: AtWork) -> None:
    """Another job takes both nodes."""
    take_all_nodes()


def out_of_time(work: AtWork) -> None:
    """The job comes near its time limit: Slurm, which looks twice a minute, tells it so next."""
    change = [f"JobId={job_of(work)}", "EndTime=now+150"]
    subprocess.run(["scontrol", "update", *change], check=True)


def interrupt(request: Request, way: Callable[[AtWork], None], message: str) -> int:
    """Has Slurm end a training; returns the first step of that attempt."""
    started = time.monotonic()
    # A job is told of its time limit 30 seconds and the grace period ahead.
    with at_work(request, runner(grace_seconds=120), is_under_way) as work:
        went_on = time.monotonic()
        with paused(request):
            way(work)
        told = time.monotonic()
        error = work.join()
    tell(way.__name__, went_on - started, time.monotonic() - told)
    assert isinstance(error, PreemptedError), error
    assert message in str(error)
    return first_step(work.heard)


def test_a_training_on_two_nodes_outlives_what_happens_to_a_node_with_the_same_bytes(
    tmp_path: Path, store: LocalStore
) -> None:
    policy = make_tiny_llama(tmp_path / "policy")
    pairs = make_pairs(tmp_path / "pairs.parquet", 29, ties=(3, 7))
    undisturbed = trains_on_two_nodes(tmp_path / "other", policy, pairs)
    heard = run(undisturbed)
    assert any("waiting for 1 times" in line for line in said(heard))

    request = trains_on_two_nodes(store.root, policy, pairs)
    for way in (kill, freeze):
        error, processes = disturb(request, way)
        assert type(error) is StageFailedError
        assert ("ended by SIGKILL" in str(error)) == (way is kill), error
        assert end(processes)
    try:
        error, processes = disturb(request, cut_off)
        assert isinstance(error, StageFailedError)
        assert end(processes), "behind the cut cable, too"
    finally:
        set_link("up")
    steps = [
        interrupt(request, preempted, "was preempted"),
        interrupt(request, out_of_time, "came near its time limit"),
        first_step(run(request)),
    ]
    assert 1 < steps[0] < steps[1] < steps[2], "from later checkpoints"
    assert weights(undisturbed) == weights(request)
