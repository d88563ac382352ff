"""A stand-in for JobSet's controller, which the tests' cluster cannot run.

It does to the JobSets of a namespace and their pods what the controllers of JobSet and of Jobs do
together: names and labels, ``suspend``, a pod's failure or deletion that fails the JobSet, and the
others' deletion then. There are no Jobs in between. A JobSet with the label of a queue is suspended
at first, as Kueue does it.
"""

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from flows.pipeline.placement import KubernetesSettings
from flows.runners.kubernetes.client import Cluster
from flows.runners.kubernetes.identity import jobset_of, label, name_of
from tests.kubernetes.cluster import Namespace, kubectl

QUEUE = "kueue.x-k8s.io/queue-name"
DEFINITION = str(Path(__file__).with_name("jobsets.yaml"))
_SIGS = "jobset.sigs.k8s.io/"
_LOOK_SECONDS = 0.3


class JobSets:
    """The JobSets of a namespace, and what is done to them."""

    def __init__(self, namespace: str) -> None:
        self._cluster = Cluster(KubernetesSettings(namespace=namespace))
        # Read here: the client's own default is what the variable named as it was imported.
        connection = config.new_client_from_config(os.environ["KUBECONFIG"])
        self._custom = client.CustomObjectsApi(connection)
        self._place = ("jobset.x-k8s.io", "v1alpha2", namespace, "jobsets")

    def names(self) -> list[str]:
        """Names of those that nobody has deleted."""
        found = self._cluster.jobsets("")
        return [name_of(each) for each in found if "deletionTimestamp" not in each["metadata"]]

    def suspend(self, name: str, *, to: bool) -> None:
        """Suspends or resumes a JobSet, as a queue does."""
        change = {"spec": {"suspend": to}}
        self._custom.patch_namespaced_custom_object(*self._place, name, change)

    def work(self, closed: threading.Event) -> None:
        """Does a controller's work until the event is set."""
        while not closed.wait(_LOOK_SECONDS):
            pods = self._cluster.pods("")
            for each in self._cluster.jobsets(""):
                # What has changed meanwhile is seen in the next round.
                with contextlib.suppress(ApiException):
                    self._reconcile(each, [pod for pod in pods if jobset_of(pod) == name_of(each)])

    def _reconcile(self, jobset: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        spec, phases = jobset["spec"], [pod["status"].get("phase") for pod in pods]
        left = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        jobs = spec["replicatedJobs"]
        wanted = [(job, index) for job in jobs for index in range(job["replicas"])]
        if "deletionTimestamp" in jobset["metadata"]:
            return
        if label(jobset, QUEUE) and "suspend" not in spec:
            self.suspend(name_of(jobset), to=True)
        elif jobset.get("status") or spec.get("suspend"):
            for pod in left:
                if pod["status"].get("phase") in ("Pending", "Running"):
                    self._cluster.delete(pod)
        # A Job counts a deleted pod as failed.
        elif "Failed" in phases or left != pods:
            self._end(name_of(jobset), "Failed")
        elif phases.count("Succeeded") == len(wanted):
            self._end(name_of(jobset), "Completed")
        else:
            there = {label(pod, f"{_SIGS}job-global-index") for pod in pods}
            for number, (job, index) in enumerate(wanted):
                if str(number) not in there:
                    self._cluster.create(_pod(jobset, job, index, number))

    def _end(self, name: str, condition: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        made = {"type": condition, "status": "True", "reason": "Any", "message": ""}
        status = {"status": {"conditions": [made | {"lastTransitionTime": now}]}}
        self._custom.patch_namespaced_custom_object_status(*self._place, name, status)


@contextlib.contextmanager
def jobsets(cluster: Namespace) -> Iterator[JobSets]:
    """Makes the cluster one with JobSets, within the block."""
    kubectl("apply", "-f", DEFINITION)
    kubectl("wait", "--for=condition=Established", "-f", DEFINITION)
    made, closed = JobSets(cluster.name), threading.Event()
    controller = threading.Thread(target=made.work, args=[closed])
    controller.start()
    try:
        yield made
    finally:
        closed.set()
        controller.join()
        kubectl("delete", "-f", DEFINITION)


def _pod(jobset: dict[str, Any], job: dict[str, Any], index: int, number: int) -> dict[str, Any]:
    name, template = name_of(jobset), job["template"]["spec"]["template"]
    labels = {"jobset-name": name, "replicatedjob-name": job["name"]}
    labels |= {"job-index": str(index), "job-global-index": str(number)}
    owner = {"apiVersion": jobset["apiVersion"], "kind": "JobSet", "name": name}
    owner |= {"uid": jobset["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
    metadata = template["metadata"] | {
        "name": f"{name}-{job['name']}-{index}-{uuid.uuid4().hex[:5]}",
        "labels": template["metadata"]["labels"] | {_SIGS + key: labels[key] for key in labels},
        "ownerReferences": [owner],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
