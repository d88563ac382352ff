"""Devices of a stage's processes: GPUs, or threads, dealt out as environment variables."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

from stages.contract.errors import EXIT_STOPPED
from stages.contract.request import Resources

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Both: MKL, where it is told its own number, takes that, and torch follows it.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def num_devices(resources: Resources) -> int:
    """Devices of a stage on its node: its GPUs, or its processes on a CPU."""
    return resources.gpus or resources.processes


def device_environments(resources: Resources, each: int = 1) -> list[dict[str, str]]:
    """Environment variables of the processes that share a stage's devices.

    Args:
        resources: Those of the stage.
        each: Devices of one process; those that are too few for another process stay unused.

    Returns:
        For each process its GPUs, or its share of the threads.
    """
    number = num_devices(resources) // each
    if resources.gpus:
        given = os.environ.get(_VISIBLE)
        devices = given.split(",") if given else [str(index) for index in range(resources.gpus)]
        groups = [devices[index * each : (index + 1) * each] for index in range(number)]
        return [{_VISIBLE: ",".join(group)} for group in groups if len(group) == each]
    # `4,2` is 4 outside nested regions; of what is no number OpenMP takes no notice either.
    named = (os.environ.get(name, "").partition(",")[0].strip() for name in _THREADS)
    threads = next((int(each) for each in named if each.isdecimal()), 0) or os.cpu_count() or 1
    return [dict.fromkeys(_THREADS, str(max(1, threads // number)))] * number


def end_with_parent() -> None:
    """Ends this process, started by multiprocessing, when its parent ends, however that ended."""
    threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(EXIT_STOPPED)
