"""Training on two nodes of a real cluster, in pods, undisturbed and disturbed."""

from pathlib import Path

import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from stages.contract.errors import PreemptedError
from stages.contract.events import Metric
from tests.kubernetes.cluster import CPUS, frozen, without
from tests.two_nodes import Fault, killed, make_inputs, outlives, train, training

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow, pytest.mark.release]


def hosts_of_pods(cluster):
    """Nodes of the pods, by the pods' names."""
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in cluster.pods()}


@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_faults_of_a_node_change_no_byte_of_a_training(cluster, tmp_path_factory, tmp_path):
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"))
    request, calm = (
        training(inputs, tmp_path / name, cpus=CPUS, timeout_seconds=3600)
        for name in ("store", "calm")
    )

    def runner(store=request.store):
        settings = cluster.settings(inputs, Path(store))
        return make_runner(Execution(runner="kubernetes", kubernetes=settings, grace_seconds=10))

    hosts = {}

    def look(event):
        if isinstance(event, Metric) and not hosts:
            hosts.update(hosts_of_pods(cluster))

    undisturbed = train(calm, runner(calm.store), look)
    assert len(set(hosts.values())) == 2, "each pod on another machine"

    def node_of(number):
        [node] = [
            node for name, node in hosts_of_pods(cluster).items() if name.endswith(f"-{number}")
        ]
        return node

    def node_frozen(*_):
        return frozen(node_of(1))

    def node_cut_off(*_):
        return without(node_of(1), "cut", "mend")

    def first_node_powered_off(*_):
        return without(node_of(0), "kill", "start")

    lost = "its node does not answer"
    faults = [
        Fault(killed, runner, message="SIGKILL"),
        Fault(node_frozen, runner, PreemptedError, lost),
        Fault(node_cut_off, runner, PreemptedError, lost),
        Fault(first_node_powered_off, runner, PreemptedError, lost),
    ]
    outlives(request, faults, undisturbed)
    assert cluster.pods() == []
