"""The cluster, and a namespace of it for the tests of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.contract.local_store import LocalStore
from tests.kubernetes.cluster import Namespace, load_image, namespace, reachable_cluster
from tests.probe_stage import install


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """A namespace of a real cluster."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with reachable_cluster(shared / "cluster"):
        load_image(tmp_path_factory.mktemp("image"))
        with namespace() as made:
            yield made


@pytest.fixture
def store(
    cluster: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalStore]:
    """A store, for probes in pods; none of its pods may be left after the test."""
    install(tmp_path / "code", monkeypatch)
    made = LocalStore.open(str(tmp_path / "store"), create=True)
    yield made
    assert cluster.pods() == []
