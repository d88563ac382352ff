"""A namespace of the cluster for the tests of a process, and its nodes."""

import pytest

from tests.kubernetes.pods import kubernetes_launcher, nodes_in_use
from tests.launchers.launcher import store as store


@pytest.fixture(scope="package")
def launcher(tmp_path_factory):
    """Starts probes in pods."""
    with kubernetes_launcher(tmp_path_factory) as launcher:
        yield launcher


@pytest.fixture(scope="package")
def cluster(launcher):
    """The namespace of the pods."""
    return launcher.cluster


@pytest.fixture(autouse=True)
def nodes(request, tmp_path_factory):
    """The nodes: for tests of several processes at a time, or for one that takes a node away."""
    alone = request.node.get_closest_marker("alone") is not None
    with nodes_in_use(tmp_path_factory, alone=alone):
        yield
