"""Prefect hooks for flow runs that ended without having cleaned up after themselves."""

from __future__ import annotations

from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.logging.loggers import flow_run_logger
from prefect.states import State


def remove_containers(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Removes containers whose orchestrator was killed; those configured to outlive it stay.

    For ``on_cancellation`` and ``on_crashed``: these run in the worker when the flow run's process
    is gone. Prefect wants exactly these names of the parameters.
    """
    if not _uses_docker(flow_run.parameters):
        return
    # Here: only these runs need the engine's client.
    from flows.runners.docker.reaper import reap

    for line in reap(keep_running=True):
        flow_run_logger(flow_run, flow).warning(line)


def _uses_docker(parameters: Any) -> bool:
    """Whether a flow run's parameters name the docker runner, wherever they do."""
    if not isinstance(parameters, dict):
        return False
    named = "docker" in (parameters.get("runner"), parameters.get("launcher"))
    return named or any(_uses_docker(each) for each in parameters.values())
