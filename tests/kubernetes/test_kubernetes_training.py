"""Training on two nodes of a real cluster: undisturbed, and with its second node disturbed."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.errors import PreemptedError, StageFailedError
from stages.contract.events import Event, Metric
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

# Some 80 steps: a node is disturbed five times before the last ones.
SETTINGS = {
    "epochs": 32,
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
        limits = {"cpus": CPUS, "timeout_seconds": 3600}
        resources = request.resources.model_copy(update=limits)
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


@dataclass(frozen=True)
class Second:
    """The second node of a training at work.

    Attributes:
        node: Its name.
        pod: Name of the training's pod there.
        processes: What the pod runs.
        cluster: Namespace of the pod.
    """

    node: str
    pod: str
    processes: set[psutil.Process]
    cluster: Namespace


@contextlib.contextmanager
def killed(second: Second) -> Iterator[None]:
    """All processes of the training on the node are killed."""
    for each in second.processes:
        # The kernel ends the others with the first process of a container.
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    yield


@contextlib.contextmanager
def paused(second: Second) -> Iterator[None]:
    """No step is made until the pod is told to end, however long the cluster takes for that."""
    workers = [each for each in second.processes if not each.children()]
    for each in workers:
        each.suspend()
    try:
        yield
        while any(
            pod["metadata"]["name"] == second.pod and pod["status"]["phase"] == "Running"
            for pod in second.cluster.pods()
        ):
            time.sleep(0.2)
    finally:
        for each in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


@contextlib.contextmanager
def preempted(second: Second) -> Iterator[None]:
    """A pod of higher priority takes the place of the training's."""
    cpus = int(kubectl("get", "node", second.node, "-o", "jsonpath={.status.allocatable.cpu}"))
    try:
        with paused(second):
            second.cluster.apply(priority(), rival(second.node, {"cpu": str(cpus)}))
        yield
    finally:
        kubectl("-n", second.cluster.name, "delete", "pod", "rival", "--now", "--ignore-not-found")
        name = priority()["metadata"]["name"]
        kubectl("delete", "priorityclass", name, "--ignore-not-found")


def priority() -> dict[str, Any]:
    """A priority class whose pods take the place of others."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "geb-test-urgent"},
        "value": 1000,
    }


def rival(node: str, limits: dict[str, str]) -> dict[str, Any]:
    """A pod that needs the place of another one on a node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rival"},
        "spec": {
            "priorityClassName": priority()["metadata"]["name"],
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "rival", "image": "rival:1", "resources": {"limits": limits}}],
        },
    }


@contextlib.contextmanager
def out_of_time(second: Second) -> Iterator[None]:
    """The time of the training's pod is over."""
    patch = json.dumps({"spec": {"activeDeadlineSeconds": 1}})
    with paused(second):
        kubectl("-n", second.cluster.name, "patch", "pod", second.pod, "-p", patch)
    yield


def frozen_node(second: Second) -> AbstractContextManager[None]:
    """The node, kubelet included, stands still."""
    return frozen(second.node)


def node_cut_off(second: Second) -> AbstractContextManager[None]:
    """The node has no network."""
    return cut_off(second.node)


def disturb(
    training: Training, cluster: Namespace, fault: Callable[[Second], AbstractContextManager[None]]
) -> tuple[BaseException | None, int]:
    """Disturbs a training's second node; returns the error, and the attempt's first step."""
    started = time.monotonic()
    with at_work(training.request, training.runner(), is_under_way) as work:
        went_on = time.monotonic()
        [(pod, node)] = [each for each in hosts(cluster).items() if each[0].endswith("-1")]
        processes = processes_of_second_node(training.request)
        assert processes
        with fault(Second(node, pod, processes, cluster)):
            error = work.join()
            ended = time.monotonic()
    assert cluster.pods() == [], "the other pod has ended, too"
    assert end(processes), "at the latest when the node is heard of again"
    tell(fault.__name__, went_on - started, ended - went_on)
    return error, first_step(work.heard)


FAULTS = [
    (killed, StageFailedError, "SIGKILL"),
    (preempted, PreemptedError, "a pod of higher priority"),
    (out_of_time, StageFailedError, "took longer than timeout_seconds"),
    (frozen_node, StageFailedError, ""),
    (node_cut_off, StageFailedError, ""),
]


@pytest.mark.alone
@pytest.mark.timeout(1500)
def test_a_training_outlives_what_happens_to_a_node_with_the_same_bytes(
    cluster: Namespace, inputs: Path, undisturbed: Artifact, tmp_path: Path
) -> None:
    training = Training(cluster, inputs, tmp_path / "store")
    steps = []
    for fault, kind, message in FAULTS:
        error, step = disturb(training, cluster, fault)
        assert isinstance(error, kind), error
        assert re.search(message, str(error)), error
        steps.append(step)
    made = training.run()
    steps.append(first_step(training.heard))
    assert steps[0] == 1 < steps[1], "from a checkpoint"
    assert steps == sorted(steps), "and never from an earlier one"
    print("first steps of the attempts:", *steps)
    assert made.manifest.digest("") == undisturbed.manifest.digest("")
