"""Processes and steps of a training on two nodes that both are on this machine."""

from __future__ import annotations

import psutil

from stages.contract.events import Event, Metric
from stages.contract.local_store import LocalStore
from stages.contract.request import Request


def is_under_way(event: Event) -> bool:
    """True once a training has made steps; with a first checkpoint if it began anew."""
    return isinstance(event, Metric) and event.step > 6


def processes_of_second_node(request: Request) -> set[psutil.Process]:
    """All of a training's processes on its second node."""
    work = str(LocalStore.open(request.store).work_path(request.stage, request.key))
    found = [
        each
        for each in psutil.process_iter(["cmdline", "name"])
        if work in (each.info["cmdline"] or []) and each.info["name"].startswith("python")
    ]
    return {below for top in found for below in (top, *top.children(recursive=True))}


def end(processes: set[psutil.Process]) -> bool:
    """Waits for processes to end; False where one has not within two minutes."""
    return not psutil.wait_procs(processes, timeout=120)[1]


def first_step(heard: list[Event]) -> int:
    """The first step that an attempt told of."""
    return min(each.step for each in heard if isinstance(each, Metric))


def weights(request: Request) -> bytes:
    """The trained weights."""
    artifact = LocalStore.open(request.store).load(request.stage, request.key)
    assert artifact is not None
    return artifact.file("checkpoint/model.safetensors").read_bytes()


def tell(fault: str, steps_after: float, over_after: float) -> None:
    """Prints the seconds of an attempt, which `pytest -s` shows.

    Args:
        fault: Name of the fault.
        steps_after: Seconds from the attempt's start to its steps.
        over_after: Seconds from the fault to the attempt's end, when the next one may start.
    """
    print(f"{fault}: steps {steps_after:.0f} s after the start, over {over_after:.0f} s after it")
