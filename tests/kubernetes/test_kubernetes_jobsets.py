"""Stages with several nodes on a cluster that has JobSets, and a queue for them."""

from collections.abc import Iterator

import pytest

from flows.runners.base import PlaceNotice
from flows.runners.kubernetes.client import Cluster
from flows.runners.kubernetes.runner import KubernetesPlace, reap
from stages.contract.errors import PreemptedError
from stages.contract.events import Event
from stages.contract.request import Resources
from stages.store.base import Store
from tests.at_work import at_work, hangs
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import Namespace
from tests.kubernetes.jobsets import QUEUE, JobSets, jobsets
from tests.kubernetes.pods import execution, probe_settings, request_for, runner
from tests.orchestrators import orchestrator

# The definition of JobSets is the whole cluster's.
pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def there(cluster: Namespace) -> Iterator[JobSets]:
    """JobSets of the namespace, none of which may be left after the test."""
    with jobsets(cluster) as made:
        yield made
        wait_until(lambda: not made.names() and not cluster.pods())


def uids(cluster: Namespace) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.pods()}


def waits(event: Event) -> bool:
    return isinstance(event, PlaceNotice) and event.message.startswith("waiting: queued")


def test_a_gang_waits_in_its_queue_and_is_preempted_when_that_takes_its_room(
    cluster: Namespace, store: Store, there: JobSets
) -> None:
    request = request_for(store, Resources(nodes=2), behaviour="hang")
    settings = probe_settings(cluster, request, labels={QUEUE: "research"})
    with orchestrator(request, execution(settings, on_orchestrator_death="keep"), "queued"):
        [queued] = there.names()
    chosen = runner(settings)
    assert chosen.has_running(request), "which keeps its place in the queue"
    with at_work(request, chosen, waits) as work:
        assert cluster.pods() == []
        there.suspend(queued, to=False)
        wait_until(lambda: any(hangs(each) for each in work.heard))
        assert there.names() == [queued]
        assert not any(QUEUE in pod["metadata"]["labels"] for pod in cluster.pods())
        there.suspend(queued, to=True)
        error = work.join()
    assert isinstance(error, PreemptedError)
    assert "its JobSet was suspended: its queue needs the room" in str(error)


def test_a_gang_of_a_dead_orchestrator_is_taken_over_or_removed_at_once(
    cluster: Namespace, store: Store, there: JobSets
) -> None:
    request = request_for(store, Resources(nodes=2), behaviour="hang")
    settings = probe_settings(cluster, request)
    kept = execution(settings, on_orchestrator_death="keep")
    with orchestrator(request, kept):
        pods = uids(cluster)
    with at_work(request, runner(settings)):
        assert uids(cluster) == pods, "the same ones"
    with orchestrator(request, kept):
        pass
    [name] = there.names()
    KubernetesPlace(kept)
    said = f"removed JobSet {name}: its orchestrator is gone"
    assert reap(Cluster(settings), keep_running=False) == [said]
