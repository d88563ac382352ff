"""Stages with several nodes on a cluster that has JobSets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.runners.base import PlaceNotice
from flows.runners.kubernetes.client import Cluster
from flows.runners.kubernetes.manifest import place_of
from flows.runners.kubernetes.runner import KubernetesPlace, reap
from flows.runners.place import PlaceRunner
from stages.contract.errors import PreemptedError, StageFailedError
from stages.contract.events import Event
from stages.contract.request import Request, Resources
from stages.store.base import Store
from tests.at_work import at_work, hangs
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import CPUS, Namespace, without
from tests.kubernetes.jobsets import QUEUE, jobsets, names_of_jobsets, suspend
from tests.kubernetes.pods import execution, probe_settings, request_for, run, runner
from tests.orchestrators import orchestrator
from tests.two_nodes import Fault, killed, make_inputs, outlives, train, training

# The definition of JobSets is the whole cluster's.
pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def controller(cluster: Namespace) -> Iterator[None]:
    """JobSet's definition and a controller; no JobSet and no pod may be left after the test."""
    with jobsets(cluster):
        yield
        wait_until(lambda: names_of_jobsets(cluster) == [] and cluster.pods() == [])


def gang(store: Store, **params: Any) -> Request:
    return request_for(store, Resources(nodes=2), **params)


def uids(cluster: Namespace) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.pods()}


def waits(event: Event) -> bool:
    return isinstance(event, PlaceNotice) and event.message.startswith("waiting: ")


@pytest.mark.timeout(1800)
def test_a_training_gives_the_bytes_of_bare_pods_whatever_happens_to_a_node(
    cluster: Namespace, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    request, calm = (
        training(inputs, tmp_path / name, cpus=CPUS, timeout_seconds=3600)
        for name in ("store", "calm")
    )

    def chosen(store: str = request.store) -> PlaceRunner[Any]:
        return runner(cluster.settings(inputs, Path(store)), grace_seconds=10)

    def cut_off(*_: object) -> contextlib.AbstractContextManager[None]:
        nodes = {place_of(pod)[-2:]: pod["spec"]["nodeName"] for pod in cluster.pods()}
        return without(nodes["-1"], "cut", "mend")

    of_bare_pods = train(calm, chosen(calm.store), lambda event: None)
    with jobsets(cluster):
        faults = [
            Fault(killed, chosen, message="SIGKILL"),
            Fault(cut_off, chosen, PreemptedError, "its node does not answer"),
        ]
        outlives(request, faults, of_bare_pods)
        wait_until(lambda: names_of_jobsets(cluster) == [])
    assert cluster.pods() == []


def test_a_failure_is_no_preemption_though_the_other_pod_is_deleted_for_it(
    cluster: Namespace, store: Store, controller: None
) -> None:
    with pytest.raises(StageFailedError, match="RuntimeError: boom") as caught:
        run(cluster, gang(store, behaviour="crash"))
    assert not isinstance(caught.value, PreemptedError)


def test_a_gang_waits_in_its_queue_and_is_preempted_when_that_takes_its_room(
    cluster: Namespace, store: Store, controller: None
) -> None:
    request = gang(store, behaviour="hang")
    settings = probe_settings(cluster, request, labels={QUEUE: "research"})
    with orchestrator(request, execution(settings, on_orchestrator_death="keep"), "queued"):
        queued = names_of_jobsets(cluster)
    chosen = runner(settings)
    assert chosen.has_running(request), "which keeps its place in the queue"
    with at_work(request, chosen, waits) as work:
        assert cluster.pods() == []
        suspend(cluster, to=False)
        wait_until(lambda: any(hangs(each) for each in work.heard))
        assert names_of_jobsets(cluster) == queued
        assert not any(QUEUE in pod["metadata"]["labels"] for pod in cluster.pods())
        suspend(cluster, to=True)
        error = work.join()
    assert isinstance(error, PreemptedError)
    assert "its JobSet was suspended: its queue needs the room" in str(error)


def test_a_gang_of_a_dead_orchestrator_is_taken_over_or_removed_at_once(
    cluster: Namespace, store: Store, controller: None
) -> None:
    request = gang(store, behaviour="hang")
    settings = probe_settings(cluster, request)
    with orchestrator(request, execution(settings, on_orchestrator_death="keep")):
        pods = uids(cluster)
    with at_work(request, runner(settings)):
        assert uids(cluster) == pods, "the same ones"
    with orchestrator(request, execution(settings, on_orchestrator_death="keep")):
        pass
    [name] = names_of_jobsets(cluster)
    KubernetesPlace(execution(settings))
    assert names_of_jobsets(cluster) == [name], "kept"
    name = name.rpartition("/")[2]
    said = f"removed JobSet {name}: its orchestrator is gone"
    assert reap(Cluster(settings), keep_running=False) == [said]
