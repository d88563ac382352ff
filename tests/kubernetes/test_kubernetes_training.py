"""Training on two nodes of a real cluster, undisturbed and with a pod killed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.errors import StageFailedError
from stages.contract.events import Event, Log, Metric
from stages.contract.local_store import LocalStore
from stages.contract.store import Artifact
from tests.kubernetes.cluster import CPUS, Namespace, kubectl
from tests.stages.train.train_helpers import make_pairs, request_for
from tests.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

SETTINGS = {
    "micro_batch_tokens": 16,
    "checkpoint_every_steps": 1,
    "deepspeed": {"zero_stage": 2},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy and pairs, which other users may read."""
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_llama(folder / "policy")
    make_pairs(folder / "pairs.parquet", 16, ties=(3, 7))
    # safetensors writes for the tests' user alone, whom a pod is not.
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


class Training:
    """Two-node trainings in stores of their own."""

    def __init__(self, cluster: Namespace, inputs: Path, store: Path) -> None:
        request = request_for(
            store, inputs / "policy", [inputs / "pairs.parquet"], nodes=2, **SETTINGS
        )
        resources = request.resources.model_copy(update={"cpus": CPUS})
        self.request = request.model_copy(update={"resources": resources})
        self.settings = cluster.settings(inputs, store)
        self.heard: list[Event] = []

    def run(self, on_event: object = None) -> Artifact:
        """Trains to the end, or to the error of an attempt."""

        def hear(event: Event) -> None:
            self.heard.append(event)
            if callable(on_event):
                on_event(event)

        KubernetesRunner(self.settings, grace_seconds=10).run(self.request, hear)
        artifact = LocalStore.open(self.request.store).load("train", self.request.key)
        assert artifact is not None
        return artifact


def hosts(cluster: Namespace) -> dict[str, str]:
    """Nodes of the pods, by the pods' names."""
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in cluster.pods()}


def test_two_nodes_train_and_one_killed_costs_no_more_than_a_step(
    cluster: Namespace, inputs: Path, tmp_path: Path
) -> None:
    places: dict[str, str] = {}

    def look(event: Event) -> None:
        if isinstance(event, Metric) and not places:
            places.update(hosts(cluster))

    whole = Training(cluster, inputs, tmp_path / "whole").run(look)
    assert len(set(places.values())) == 2, "each on a machine of its own"

    training = Training(cluster, inputs, tmp_path / "disturbed")
    killed = threading.Event()

    def kill(event: Event) -> None:
        if isinstance(event, Metric) and event.step == 2 and not killed.is_set():
            killed.set()
            [second] = [name for name in hosts(cluster) if name.endswith("-1")]
            kubectl("-n", cluster.name, "delete", "pod", second, "--now", "--wait=false")

    with pytest.raises(StageFailedError, match="node 2 of 2") as caught:
        training.run(kill)
    assert "somebody deleted its pod" in str(caught.value)
    assert cluster.pods() == [], "the other one has ended, too"
    again = training.run()
    assert any(
        isinstance(each, Log) and "going on after step" in each.message for each in training.heard
    )
    assert again.manifest.digest("") == whole.manifest.digest("")
