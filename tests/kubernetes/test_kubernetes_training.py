"""Training on two nodes of a real cluster: undisturbed, with a pod or a node taken away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.errors import StageFailedError
from stages.contract.events import Event, Log, Metric
from stages.contract.local_store import LocalStore
from stages.contract.store import Artifact
from tests.at_work import at_work
from tests.kubernetes.cluster import CPUS, Namespace, cut_off, frozen, kubectl
from tests.stages.train.train_helpers import make_pairs, request_for
from tests.tiny_models import make_tiny_llama
from tests.two_nodes import (
    end,
    first_step,
    is_under_way,
    processes_of_second_node,
    tell,
)

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

# Some 60 steps, of which a fault comes after the first few.
SETTINGS = {
    "epochs": 24,
    "micro_batch_tokens": 16,
    "checkpoint_every_steps": 4,
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

        self.runner().run(self.request, hear)
        artifact = LocalStore.open(self.request.store).load("train", self.request.key)
        assert artifact is not None
        return artifact

    def runner(self) -> KubernetesRunner:
        """A runner for its pods."""
        return KubernetesRunner(self.settings, grace_seconds=10)


def hosts(cluster: Namespace) -> dict[str, str]:
    """Nodes of the pods, by the pods' names."""
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in cluster.pods()}


@pytest.fixture(scope="module")
def undisturbed(
    cluster: Namespace, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """The artifact of an undisturbed training, each of whose pods was on a machine of its own."""
    places: dict[str, str] = {}

    def look(event: Event) -> None:
        if isinstance(event, Metric) and not places:
            places.update(hosts(cluster))

    made = Training(cluster, inputs, tmp_path_factory.mktemp("undisturbed") / "store").run(look)
    assert len(set(places.values())) == 2
    return made


def test_a_training_whose_pod_is_deleted_goes_on_from_its_checkpoint(
    cluster: Namespace, inputs: Path, undisturbed: Artifact, tmp_path: Path
) -> None:
    training = Training(cluster, inputs, tmp_path / "disturbed")
    killed = threading.Event()

    def kill(event: Event) -> None:
        if is_under_way(event) and not killed.is_set():
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
    assert again.manifest.digest("") == undisturbed.manifest.digest("")


def take_away(
    training: Training, cluster: Namespace, fault: Callable[[str], AbstractContextManager[None]]
) -> int:
    """Takes the second node from a training and gives it back; returns the attempt's first step."""
    started = time.monotonic()
    with at_work(training.request, training.runner(), is_under_way) as work:
        went_on = time.monotonic()
        [node] = [node for pod, node in hosts(cluster).items() if pod.endswith("-1")]
        processes = processes_of_second_node(training.request)
        assert processes
        with fault(node):
            error = work.join()
            ended = time.monotonic()
    assert isinstance(error, StageFailedError), error
    assert cluster.pods() == [], "the other pod has ended, too"
    assert end(processes), "at the latest when the node is heard of again"
    tell(fault.__name__, went_on - started, ended - went_on)
    return first_step(work.heard)


@pytest.mark.alone
def test_a_training_outlives_a_frozen_and_a_cut_off_node_with_the_same_bytes(
    cluster: Namespace, inputs: Path, undisturbed: Artifact, tmp_path: Path
) -> None:
    training = Training(cluster, inputs, tmp_path / "store")
    assert take_away(training, cluster, frozen) == 1
    again = take_away(training, cluster, cut_off)
    made = training.run()
    assert 1 < again <= first_step(training.heard), "from checkpoints"
    assert made.manifest.digest("") == undisturbed.manifest.digest("")
