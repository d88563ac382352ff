"""Stages in pods of a real cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Event, Log, Progress
from stages.contract.local_store import LocalStore
from stages.contract.request import Request, Resources, make_request
from tests.kubernetes.cluster import Namespace
from tests.probe_stage import ProbeParams

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]


def request_for(store: LocalStore, resources: Resources | None = None, **params: Any) -> Request:
    """A request for one probe."""
    return make_request(
        ProbeParams(**params),
        inputs={},
        seed=0,
        store=str(store.root),
        run="test",
        step="probe/0",
        resources=resources,
    )


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


def test_a_stage_in_a_pod_reports_and_leaves_its_artifact(
    store: LocalStore, cluster: Namespace
) -> None:
    request = request_for(store, message="hello", prints="to the log")
    heard = run(cluster, request)
    assert Log(message="hello") in heard
    assert Progress(done=0, total=1, unit="things") in heard
    artifact = store.load("probe", request.key)
    assert artifact is not None
    assert (artifact.path / "result.txt").read_text() == "seed 0 hello"
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert "to the log" in log.read_text()


def test_a_refusal_is_a_mistake_and_a_crash_is_a_failure(
    store: LocalStore, cluster: Namespace
) -> None:
    with pytest.raises(UserError, match="bad value 7") as caught:
        run(cluster, request_for(store, behaviour="refuse"))
    assert caught.value.remedy == "use 8"
    with pytest.raises(StageFailedError, match="RuntimeError: boom"):
        run(cluster, request_for(store, behaviour="crash"))


def test_memory_beyond_the_limit_is_named(store: LocalStore, cluster: Namespace) -> None:
    request = request_for(store, Resources(memory_gib=0.25), behaviour="eat_memory")
    with pytest.raises(StageFailedError, match=r"used up its memory limit of 0\.25 GiB"):
        run(cluster, request)
