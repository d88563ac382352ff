"""Probes in pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.events import Event
from stages.contract.local_store import LocalStore
from stages.contract.request import Request, Resources
from tests.kubernetes.cluster import CPUS, Namespace
from tests.probe_requests import probe_request

# A process that runs one request: its file, and the settings as JSON.
ORCHESTRATOR = """
import sys
from pathlib import Path
from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.request import Request
settings = KubernetesSettings.model_validate_json(sys.argv[2])
hear = lambda event: print(event.model_dump_json(), flush=True)
KubernetesRunner(settings, grace_seconds=1).run(Request.read(Path(sys.argv[1])), hear)
"""


def request_for(store: LocalStore, resources: Resources | None = None, **params: Any) -> Request:
    """A request for one probe."""
    wanted = (resources or Resources()).model_copy(update={"cpus": CPUS})
    return probe_request(store, wanted, **params)


def probe_settings(cluster: Namespace, request: Request, **changes: Any) -> KubernetesSettings:
    """Settings for the pods of a probe, which see its store and its code."""
    # Not the folder that holds both: it is the tests' user's alone.
    store = Path(request.store)
    return cluster.settings(store, store.with_name("code"), **changes)


def run(cluster: Namespace, request: Request, **changes: Any) -> list[Event]:
    """Runs one probe to its end and returns what it said."""
    heard: list[Event] = []
    settings = probe_settings(cluster, request, **changes)
    KubernetesRunner(settings, grace_seconds=5).run(request, heard.append)
    return heard
