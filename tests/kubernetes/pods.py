"""Probes in pods."""

from pathlib import Path
from typing import Any

from flows.pipeline.placement import Execution, KubernetesSettings
from flows.runners.choose import make_runner
from flows.runners.runner import Runner
from stages.contract.events import Event
from stages.contract.request import Request, Resources
from stages.store.base import Store
from tests.kubernetes.cluster import CPUS, Namespace
from tests.probe_requests import probe_request


def request_for(store: Store, resources: Resources | None = None, **params: Any) -> Request:
    """A request for one probe."""
    wanted = (resources or Resources()).model_copy(update={"cpus": CPUS})
    return probe_request(store, wanted, **params)


def probe_settings(cluster: Namespace, request: Request, **changes: Any) -> KubernetesSettings:
    """Settings for the pods of a probe, which see its store and its code."""
    # Not the folder that holds both: it is the tests' user's alone.
    store = Path(request.store)
    return cluster.settings(store, store.with_name("code"), **changes)


def runner(settings: KubernetesSettings, grace_seconds: float = 1.0) -> Runner:
    """A kubernetes runner."""
    return make_runner(execution(settings, grace_seconds))


def execution(
    settings: KubernetesSettings, grace_seconds: float = 1.0, **changes: Any
) -> Execution:
    """A run's section `execution`, whose stages are pods."""
    values = {"runner": "kubernetes", "kubernetes": settings, "grace_seconds": grace_seconds}
    return Execution.model_validate(values | changes)


def run(cluster: Namespace, request: Request, **changes: Any) -> list[Event]:
    """Runs one probe to its end and returns what it said."""
    heard: list[Event] = []
    runner(probe_settings(cluster, request, **changes), 5).run(request, heard.append)
    return heard
