"""The cluster, and a namespace of it for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.contract.local_store import LocalStore
from tests.kubernetes.cluster import Namespace, load_image, namespace, reachable_cluster
from tests.probe_stage import install


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespace]:
    """A namespace of a real cluster."""
    with reachable_cluster(tmp_path_factory.mktemp("cluster")):
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
    left = [pod for pod in cluster.pods() if not pod["metadata"].get("deletionTimestamp")]
    assert left == []
