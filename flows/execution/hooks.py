"""Prefect hooks for flow runs that ended without having cleaned up after themselves."""

from __future__ import annotations

from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.logging.loggers import flow_run_logger
from prefect.states import State

from flows.pipeline.kubernetes import KubernetesSettings


def remove_containers(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Removes containers and pods whose orchestrator was killed; those to outlive it stay.

    For ``on_cancellation`` and ``on_crashed``: these run in the worker when the flow run's process
    is gone. Prefect wants exactly these names of the parameters.
    """
    if _settings_of("docker", flow_run.parameters) is not None:
        # Here: only these runs need the engine's client.
        from flows.runners.docker.container import reap

        for line in reap(keep_running=True):
            flow_run_logger(flow_run, flow).warning(line)
    cluster = _settings_of("kubernetes", flow_run.parameters)
    if cluster is not None:
        from flows.runners.kubernetes.reaper import reap_cluster

        for line in reap_cluster(KubernetesSettings.model_validate(cluster), keep_running=True):
            flow_run_logger(flow_run, flow).warning(line)


def _settings_of(runner: str, parameters: Any) -> dict[str, Any] | None:
    """A runner's settings where a flow run's parameters name it, wherever they do."""
    if not isinstance(parameters, dict):
        return None
    if runner in (parameters.get("runner"), parameters.get("launcher")):
        return parameters.get(runner) or {}
    found = (_settings_of(runner, each) for each in parameters.values())
    return next((each for each in found if each is not None), None)
