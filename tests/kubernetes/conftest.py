"""The cluster, and a namespace of it for the tests of a process."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.store.base import Store
from stages.store.locks import exclusive_lock
from tests.kubernetes.cluster import Namespace, namespace, reachable_cluster


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes of a session have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="package")
def cluster(shared: Path) -> Iterator[Namespace]:
    """A namespace of a real cluster."""
    with reachable_cluster(shared / "cluster"), namespace() as made:
        yield made


@pytest.fixture(autouse=True)
def nodes(request: pytest.FixtureRequest, shared: Path) -> Iterator[None]:
    """The nodes: for tests of several processes at a time, or for one that takes a node away."""
    alone = request.node.get_closest_marker("alone") is not None
    with (shared / "nodes").open("w") as users:
        # One that waits for all others lets no further ones in.
        with exclusive_lock(shared / "nodes-gate"):
            fcntl.flock(users, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture
def store(cluster: Namespace, tmp_path: Path, probe_stage: None) -> Iterator[Store]:
    """A store, for probes in pods; none of its pods may be left after the test."""
    made = Store.open(str(tmp_path / "store"), create=True)
    yield made
    assert cluster.pods() == []
