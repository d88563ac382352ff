"""Pods of dead orchestrators, and clusters that are configured wrongly, without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from urllib3.exceptions import ProtocolError

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.kubernetes.client import Cluster, PodList
from flows.runners.kubernetes.labels import annotations_for, labels_for
from flows.runners.kubernetes.reaper import reap
from stages.contract.errors import UserError
from stages.contract.local_store import LocalStore
from stages.contract.request import make_request
from tests.probe_stage import ProbeParams


class NodeIsGone:
    """A cluster with one pod, on a node that breaks connections off in the middle of a log."""

    def __init__(self, pod: dict[str, Any]) -> None:
        self._pod = pod
        self.deleted: list[str] = []

    def pods(self, selector: str) -> PodList:
        return PodList([self._pod], "1")

    def log(self, name: str, **_: object) -> Iterator[bytes]:
        yield b"one line"
        raise ProtocolError("Connection broken")

    def delete_pod(self, name: str) -> None:
        self.deleted.append(name)


def test_a_pod_whose_log_cannot_be_read_is_removed_all_the_same(tmp_path: Path) -> None:
    store = LocalStore.open(str(tmp_path), create=True)
    request = make_request(
        ProbeParams(), inputs={}, seed=0, store=str(tmp_path), run="test", step="probe/0"
    )
    cluster: Any = NodeIsGone(
        {
            "metadata": {
                "name": "geb-x-0",
                "labels": labels_for(request, "geb-x", 0),
                "annotations": annotations_for(request, "stop"),
            },
            "status": {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]},
        }
    )
    [line] = reap(cluster, keep_running=True)
    assert "geb-x-0" in line
    assert cluster.deleted == ["geb-x-0"]
    [log] = store.log_path(request.stage, request.key).glob("left-*.log")
    assert log.read_text() == "one line\n"


@pytest.mark.parametrize("text", ["{", "", "contexts: []"])
def test_a_damaged_configuration_of_a_cluster_is_a_person_s_mistake(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(UserError, match="no cluster is configured") as caught:
        Cluster(KubernetesSettings(kubeconfig=str(path)))
    assert "execution.kubernetes.kubeconfig" in caught.value.remedy
