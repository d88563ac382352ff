"""Health of the places where runners start stages, for ``geb doctor --runner``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flows.pipeline.config import RunConfig
from stages.contract.errors import UserError
from stages.contract.health import Health
from stages.contract.local_store import LocalStore
from stages.contract.provenance import stages_digest
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


def _kubernetes(config: RunConfig) -> Iterator[Finding]:
    # Here, so that the cluster's client is loaded for it alone.
    from flows.runners.kubernetes.health import findings

    return findings(config)


def _slurm(config: RunConfig) -> Iterator[Finding]:
    from flows.runners.slurm.health import findings

    return findings(config)


CHECKS: Mapping[str, Callable[[RunConfig], Iterator[Finding]]] = {
    "kubernetes": _kubernetes,
    "slurm": _slurm,
}


def reap_for(runner: str | None, config: RunConfig) -> list[str]:
    """Removes what dead orchestrators left with a runner, also what was to outlive them.

    Args:
        runner: Its name; None for containers of this machine, if it has a Docker engine.
        config: Holds its settings and, where that tells what is meant, the store.

    Returns:
        A line for each thing that was removed.

    Raises:
        UserError: This runner leaves nothing, or the place that is named does not answer.
    """
    if runner == "kubernetes":
        from flows.runners.kubernetes.reaper import reap_cluster

        return reap_cluster(config.execution.kubernetes, keep_running=False)
    if runner == "slurm":
        from flows.runners.slurm.reaper import sweep

        return sweep(LocalStore.open(config.store), cancel=True)
    if runner in (None, "docker"):
        from flows.runners.docker.reaper import reap as reap_containers

        try:
            return reap_containers(keep_running=False)
        except UserError as error:
            if runner is None:
                return [f"containers were not looked for: {error}"]
            raise
    raise UserError(f"--reap --runner {runner}: stages of this runner leave nothing")


def runner_findings(runner: str, config: RunConfig) -> Iterator[Finding]:
    """Looks at the place of a runner, as a configuration has it.

    Raises:
        UserError: There is nothing to look at beyond this machine.
    """
    if runner not in CHECKS:
        raise UserError(
            f"--runner {runner}: no such place beyond this machine", f"one of: {', '.join(CHECKS)}"
        )
    return CHECKS[runner](config)
