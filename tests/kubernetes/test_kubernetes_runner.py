"""A quota of a real cluster, and pods whose orchestrator is dead."""

import pytest

from stages.contract.errors import UserError
from stages.contract.request import Resources
from tests.at_work import at_work
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import kubectl
from tests.orchestrators import orchestrator

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

QUOTA = "exceeded quota: team"


def test_a_quota_is_waited_for(launcher, store):
    hard = {"limits.memory": "1Gi"}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": hard},
    }
    launcher.cluster.apply(quota)
    query = ("get", "resourcequota", "team", "--output=jsonpath={.status.hard}")
    # Before its controller has seen it, a quota holds nothing back.
    wait_until(lambda: kubectl("-n", launcher.cluster.name, *query))
    try:
        with pytest.raises(UserError, match=r"must specify limits\.memory"):
            launcher.run(launcher.request(store))
        big = launcher.request(store, Resources(memory_gib=0.75), behaviour="hang")
        small = launcher.request(store, Resources(memory_gib=0.5))
        with (
            at_work(big, launcher.runner(big)) as work,
            at_work(small, launcher.runner(small), lambda event: QUOTA in str(event)) as waiting,
        ):
            launcher.take_machine(work)
            assert waiting.join() is None
    finally:
        kubectl("-n", launcher.cluster.name, "delete", "resourcequota", "team")


@pytest.mark.alone
def test_pods_of_a_dead_orchestrator_are_taken_over_together(launcher, store):
    request = launcher.request(store, Resources(nodes=2), behaviour="hang")
    with orchestrator(request, launcher.execution(request, death="keep")):
        pass
    pods = [pod["metadata"]["uid"] for pod in launcher.cluster.pods()]
    with at_work(request, launcher.runner(request)):
        assert [pod["metadata"]["uid"] for pod in launcher.cluster.pods()] == pods
