"""Probes in pods of a real cluster."""

import contextlib
import fcntl
from pathlib import Path
from typing import ClassVar

from stages.contract.errors import PreemptedError
from stages.contract.request import Resources
from stages.store.locks import exclusive_lock
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import CPUS, kubectl, namespace, reachable_cluster
from tests.launchers.launcher import Launcher, Mistake, shared_folder


class Kubernetes(Launcher):
    """Pods of a namespace; a store, its probes' code and what they need come from this machine."""

    name = "kubernetes"
    loss = PreemptedError, "its pod was deleted"
    mistake = Mistake(
        {"image": "localhost/nothing:1", "pending_seconds": 60},
        "localhost/nothing:1",
        "execution.kubernetes",
    )
    refused = (
        ({"spec": {"priorityClassName": "nothing"}}, {}, "no PriorityClass with name nothing"),
        ({"namespace": "nothing"}, {}, 'namespaces "nothing" not found'),
        ({"extra_resources": {"nothing": 1}}, {}, "Invalid value"),
    )
    waits: ClassVar = {"spec": {"nodeSelector": {"pool": "none"}}}

    def __init__(self, cluster):
        self.cluster = cluster

    def settings(self, request, **changes):
        return {"kubernetes": self.pod_settings(request, **changes)}

    def pod_settings(self, request, **changes):
        """Settings for the pods of a probe, which see its store and its code."""
        # Not the folder that holds both: it is the tests' user's alone.
        store = Path(request.store)
        return self.cluster.settings(store, store.with_name("code"), **changes)

    def variables(self, values):
        """Settings with these environment variables for a probe."""
        return {"environment": self.cluster.settings().environment | values}

    def request(self, store, resources=None, **params):
        resources = (resources or Resources()).model_copy(update={"cpus": CPUS})
        return super().request(store, resources, **params)

    def take_machine(self, work):
        [pod] = self.cluster.pods()
        kubectl("-n", self.cluster.name, "delete", "pod", pod["metadata"]["name"])

    def await_end(self, request, pids):
        wait_until(lambda: all(pod["status"]["phase"] == "Failed" for pod in self.cluster.pods()))

    def left(self, store):
        return [pod["metadata"]["name"] for pod in self.cluster.pods()]


@contextlib.contextmanager
def kubernetes_launcher(folders):
    """Pods in a new namespace of a real cluster."""
    with reachable_cluster(shared_folder(folders) / "cluster"), namespace() as cluster:
        yield Kubernetes(cluster)


@contextlib.contextmanager
def nodes_in_use(folders, *, alone=False):
    """Keeps tests that take a node away from other processes' tests."""
    shared = shared_folder(folders)
    with (shared / "nodes").open("w") as users:
        # One that waits for all others lets no further ones in.
        with exclusive_lock(shared / "nodes-gate"):
            fcntl.flock(users, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
