"""The whole loop in pods: the artifacts of the process runner; orchestrators that are killed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.config import StageResources
from flows.pipeline.placement import KubernetesSettings
from flows.runners.kubernetes.client import Cluster
from flows.runners.kubernetes.runner import KubernetesPlace, reap
from stages.contract.events import Log
from stages.contract.request import Resources
from stages.store.base import Store
from tests.at_work import at_work
from tests.flows.loop import geb_ok, geb_refused, plan, result_digests, write_config
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import CPUS, Namespace, kubectl
from tests.kubernetes.pods import execution, probe_settings, request_for, runner
from tests.orchestrators import orchestrator

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

RESOURCES = {stage: {"cpus": CPUS} for stage in StageResources.model_fields}


def section(settings: KubernetesSettings) -> dict[str, Any]:
    """A configuration's section `execution`, as it is written."""
    return execution(settings).model_dump(mode="json", exclude_defaults=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spec": {"priorityClassName": "nothing"}}, "no PriorityClass with name nothing"),
        ({"namespace": "nothing"}, 'namespaces "nothing" not found'),
        ({"extra_resources": {"nothing": 1}}, "Invalid value"),
    ],
    ids=["priority class", "namespace", "resource"],
)
def test_a_plan_names_what_the_cluster_would_refuse(
    cluster: Namespace, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    settings = cluster.settings(tmp_path / "store").model_dump(exclude_defaults=True)
    chosen = KubernetesSettings.model_validate(settings | changes)
    config = write_config(tmp_path, execution=section(chosen), resources=RESOURCES)
    assert said in geb_refused("plan", config)
    assert not (tmp_path / "store/artifacts").exists()


def test_the_loop_gives_the_artifacts_of_the_process_runner(
    cluster: Namespace, finished: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    config = write_config(tmp_path, execution=section(cluster.settings(store)), resources=RESOURCES)
    geb_ok("run", config)
    assert result_digests(store) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {each["action"] for each in planned.values()} == {"reuse"}, "processes find it all"
    assert cluster.pods() == []


@contextlib.contextmanager
def killed_orchestrator(
    cluster: Namespace, store: Store, death: str, **params: Any
) -> Iterator[Any]:
    """Settings and request of an orchestrator that is killed while its probe hangs."""
    request = request_for(store, **params)
    settings = probe_settings(cluster, request)
    with orchestrator(request, execution(settings, on_orchestrator_death=death)):
        pass
    try:
        yield request, settings
    finally:
        for pod in cluster.pods():
            Cluster(settings).delete_pod(pod["metadata"]["name"])


def test_the_next_orchestrator_takes_a_kept_pod_over(store: Store, cluster: Namespace) -> None:
    with killed_orchestrator(cluster, store, "keep", behaviour="hang") as (request, settings):
        [pod] = cluster.pods()
        chosen = runner(settings)
        with at_work(request, chosen) as work:
            [taken] = cluster.pods()
            assert taken["metadata"]["uid"] == pod["metadata"]["uid"]
            assert any("taking over" in str(each) for each in work.heard)
            # Its log is read from the beginning.
            assert any(isinstance(each, Log) and "pids " in each.message for each in work.heard)


def test_under_stop_a_pod_ends_without_its_orchestrator_and_is_removed(
    store: Store, cluster: Namespace
) -> None:
    with killed_orchestrator(cluster, store, "stop", behaviour="leave_child") as (
        request,
        settings,
    ):
        [pod] = cluster.pods()
        phase = ["get", "pod", pod["metadata"]["name"], "-o", "jsonpath={.status.phase}"]
        wait_until(lambda: kubectl("-n", cluster.name, *phase) == "Failed")
        KubernetesPlace(execution(settings))
        assert cluster.pods() == []
    logs = store.log_path(request.stage, request.key).glob("left-*.log")
    assert "no sign of the orchestrator" in "".join(log.read_text() for log in logs)


def test_a_pod_that_is_kept_is_left_to_a_person(store: Store, cluster: Namespace) -> None:
    with killed_orchestrator(cluster, store, "keep", behaviour="hang") as (_, settings):
        KubernetesPlace(execution(settings))
        assert len(cluster.pods()) == 1


@pytest.mark.alone
def test_pods_of_a_dead_orchestrator_are_taken_over_or_removed_together(
    store: Store, cluster: Namespace
) -> None:
    gang = {"resources": Resources(nodes=2), "behaviour": "hang"}
    with killed_orchestrator(cluster, store, "keep", **gang) as (request, settings):
        pods = [pod["metadata"]["uid"] for pod in cluster.pods()]
        with at_work(request, runner(settings)):
            assert [pod["metadata"]["uid"] for pod in cluster.pods()] == pods, "the same ones"
    with killed_orchestrator(cluster, store, "stop", **gang) as (_, settings):
        names = {pod["metadata"]["name"] for pod in cluster.pods()}
        lines = {f"removed pod {name}: its orchestrator is gone" for name in names}
        assert set(reap(Cluster(settings))) == lines
