"""Training on two nodes of a cluster, both on this machine; the second one is disturbed."""

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import psutil

from flows.runners.runner import Runner
from stages.contract.errors import StageFailedError
from stages.contract.events import Metric
from stages.store.base import Store
from tests.at_work import AtWork, at_work
from tests.stages.train.train_helpers import make_pairs, request_for
from tests.tiny_models import make_tiny_llama

SETTINGS = {
    "micro_batch_tokens": 16,
    "checkpoint_every_steps": 4,
    "deepspeed": {"zero_stage": 2},
}


@dataclass(frozen=True)
class Fault:
    """Something that happens to the second node of a training.

    Attributes:
        strike: Holds it within its block; gets the training and its processes on that node.
        runner: Makes the runner of the attempt.
        error: Error of the attempt.
        message: Pattern of its message.
        saves: Whether the stage saves first, so that the next attempt starts at a later step.
    """

    strike: Callable[[AtWork, set[psutil.Process]], AbstractContextManager[None]]
    runner: Callable[[], Runner]
    error: type[StageFailedError] = StageFailedError
    message: str = ""
    saves: bool = False


@contextmanager
def killed(_, processes):
    """A fault: all processes of the second node get SIGKILL."""
    for process in processes:
        # The kernel ends a container's other processes with its first one.
        with suppress(psutil.NoSuchProcess):
            process.kill()
    yield


def make_inputs(folder):
    """A folder with a policy and pairs, which other users may read."""
    make_tiny_llama(folder / "policy")
    make_pairs(folder / "pairs.parquet", 16, ties=(3, 7))
    # safetensors writes for the tests' user alone, whom a pod is not.
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def training(inputs, store, *, epochs=32, **resources):
    """A training of some seconds, under ZeRO-2 on gloo, in a new store.

    Each epoch has two steps. A node is disturbed up to five times before the last ones.
    """
    pairs = [inputs / "pairs.parquet"]
    request = request_for(store, inputs / "policy", pairs, nodes=2, epochs=epochs, **SETTINGS)
    larger = request.resources.model_copy(update=resources)
    return request.model_copy(update={"run": "test", "step": "train", "resources": larger})


def train(request, runner, on_event):
    """Trains to the end."""
    runner.run(request, on_event)
    artifact = Store.in_folder(request.store).load(request.stage, request.key)
    assert artifact is not None
    return artifact


def outlives(request, faults, undisturbed):
    """Asserts that a training ends in the bytes of an undisturbed one, whatever faults it meets."""
    steps = []
    for fault in faults:
        error, step = _disturb(request, fault)
        assert isinstance(error, fault.error), error
        assert re.search(fault.message, str(error)), error
        steps.append(step)
    heard = []
    artifact = train(request, faults[0].runner(), heard.append)
    steps.append(first_step(heard))
    print("first steps of the attempts:", *steps)
    assert steps[0] == 1 < steps[1], "from a checkpoint"
    for fault, step, later in zip(faults, steps, steps[1:], strict=False):
        assert later > step if fault.saves else later >= step, "and never from an earlier one"
    assert artifact.manifest.digest("") == undisturbed.manifest.digest("")


def _disturb(request, fault):
    """Disturbs an attempt; returns its error and its first step."""
    started = time.monotonic()
    with at_work(request, fault.runner(), _is_under_way) as work:
        under_way = time.monotonic() - started
        processes = processes_of_second_node(request)
        assert processes
        with fault.strike(work, processes):
            struck = time.monotonic()
            error = work.join()
            over = time.monotonic() - struck
    assert end(processes), "at the latest when the node is heard of again"
    # `pytest -s` shows it: when the next attempt may start.
    name = fault.strike.__name__
    print(f"{name}: steps {under_way:.0f} s after the start, over {over:.0f} s after it")
    return error, first_step(work.heard)


def _is_under_way(event):
    """True once a training has made steps; with a first checkpoint if it began anew."""
    return isinstance(event, Metric) and event.step > 6


def processes_of_second_node(request):
    """All of a training's processes on its second node."""
    work = str(Store.in_folder(request.store).work_path(request.stage, request.key))
    starters = [
        process
        for process in psutil.process_iter(["cmdline", "name"])
        if work in (process.info["cmdline"] or []) and process.info["name"].startswith("python")
    ]
    return {below for top in starters for below in (top, *top.children(recursive=True))}


def end(processes):
    """Waits for processes to end; False where one has not within two minutes."""
    return not psutil.wait_procs(processes, timeout=120)[1]


def first_step(heard):
    """The first step that an attempt reported."""
    return min(event.step for event in heard if isinstance(event, Metric))
