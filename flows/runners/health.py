"""Health of the places where runners start stages, for ``geb doctor --runner``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.contract.code import stages_digest
from stages.contract.health import Health
from stages.contract.request import Request, Resources

# Leases and logs compare clocks of hosts.
_MOST_CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: Name of the thing.
        ok: Whether it is as a run needs it.
        detail: What was found, and the remedy where it is not.
    """

    name: str
    ok: bool
    detail: str


def faults_of(health: Health, *, ahead_seconds: float, gpus: int, other_code: str) -> Iterator[str]:
    """Faults of a place where stages are to run, each of which a stage would fail of.

    Args:
        health: What a trial has found there.
        ahead_seconds: How far the clock there was ahead of this machine's.
        gpus: GPUs that the trial asked for.
        other_code: Remedy where the stages' code there is not that of this machine.
    """
    if health.store_error:
        yield f"it does not read the store: {health.store_error}"
    if health.code != stages_digest():
        yield f"it holds other code of the stages than this machine: {other_code}"
    if abs(ahead_seconds) > _MOST_CLOCK_SECONDS:
        yield f"its clock is {ahead_seconds:+.0f} s off this machine's: leases would not hold"
    if health.gpus < gpus:
        yield f"it sees {health.gpus} GPUs of {gpus} that it asked for"


def trial_request(stage: str, resources: Resources, **more: Any) -> Request:
    """A request that says which stage asks for which resources, and no more than is given here."""
    said = {"version": "", "params": {}, "seed": 0, "inputs": {}, "key": "", "store": ""}
    said |= {"image": "core", "writes_registry": False}
    return Request.model_validate({**said, "stage": stage, "resources": resources, **more})


def one_line(error: Exception) -> str:
    """An error, its remedy included, as the detail of a finding."""
    return str(error).replace("\n", ";")
