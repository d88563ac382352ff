"""A stand-in for JobSet's controller, which the tests' cluster cannot run.

It speaks the cluster's API, and does to the JobSets of a namespace and their pods what the
controllers of JobSet and of Jobs do together: names and labels, ``suspend``, a pod's failure or
deletion that fails the JobSet, and other pods that are deleted then. There are no Jobs in between.
A JobSet with the label of a queue is suspended at first, as Kueue does it.
"""

import contextlib
import json
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tests.kubernetes.cluster import Namespace, kubectl

DEFINITION = str(Path(__file__).with_name("jobsets.yaml"))
QUEUE = "kueue.x-k8s.io/queue-name"
SIGS = "jobset.sigs.k8s.io/"
_GROUP, _VERSION = "jobset.x-k8s.io", "v1alpha2"
_LOOK_SECONDS = 0.3


@contextlib.contextmanager
def jobsets(cluster: Namespace) -> Iterator[None]:
    """Makes the cluster one with JobSets, within the block."""
    kubectl("apply", "-f", DEFINITION)
    kubectl("wait", "--for=condition=Established", "-f", DEFINITION)
    closed = threading.Event()
    controller = threading.Thread(target=_Controller(cluster.name).work, args=[closed])
    controller.start()
    try:
        yield
    finally:
        closed.set()
        controller.join()
        kubectl("delete", "-f", DEFINITION)


def names_of_jobsets(cluster: Namespace) -> list[str]:
    """Names of the JobSets of the namespace."""
    return kubectl("-n", cluster.name, "get", "jobsets", "-o", "name").split()


def suspend(cluster: Namespace, *, to: bool) -> None:
    """Suspends or resumes all JobSets, as a queue does."""
    change = json.dumps({"spec": {"suspend": to}})
    for name in names_of_jobsets(cluster):
        kubectl("-n", cluster.name, "patch", name, "--type=merge", "-p", change)


class _Controller:
    def __init__(self, namespace: str) -> None:
        connection = config.new_client_from_config()
        self._core = client.CoreV1Api(connection)
        self._custom = client.CustomObjectsApi(connection)
        self._namespace = namespace
        self._place = (_GROUP, _VERSION, namespace, "jobsets")

    def work(self, closed: threading.Event) -> None:
        while not closed.wait(_LOOK_SECONDS):
            listed = self._core.list_namespaced_pod(self._namespace, _preload_content=False)
            pods = json.loads(listed.data)["items"]
            for each in self._custom.list_namespaced_custom_object(*self._place)["items"]:
                # What has changed meanwhile is seen in the next round.
                with contextlib.suppress(ApiException):
                    self._reconcile(each, [pod for pod in pods if _jobset_of(pod) == _name(each)])

    def _reconcile(self, jobset: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        if _is_deleted(jobset):
            return
        if QUEUE in jobset["metadata"]["labels"] and "suspend" not in jobset["spec"]:
            queued = {"spec": {"suspend": True}}
            self._custom.patch_namespaced_custom_object(*self._place, _name(jobset), queued)
            return
        phases = [pod["status"].get("phase") for pod in pods]
        if jobset.get("status") or jobset["spec"].get("suspend"):
            for pod, phase in zip(pods, phases, strict=True):
                if phase in ("Pending", "Running") and not _is_deleted(pod):
                    self._core.delete_namespaced_pod(_name(pod), self._namespace)
            return
        jobs = jobset["spec"]["replicatedJobs"]
        wanted = [(job, index) for job in jobs for index in range(job["replicas"])]
        # A Job counts a deleted pod as failed, unless it is suspended.
        if "Failed" in phases or any(_is_deleted(pod) for pod in pods):
            self._set(jobset, "Failed", "ReachedMaxRestarts")
        elif phases.count("Succeeded") == len(wanted):
            self._set(jobset, "Completed", "AllJobsCompleted")
        else:
            there = {pod["metadata"]["labels"][f"{SIGS}job-global-index"] for pod in pods}
            for number, (job, index) in enumerate(wanted):
                if str(number) not in there:
                    pod = _pod(jobset, job, index, number)
                    self._core.create_namespaced_pod(self._namespace, pod)

    def _set(self, jobset: dict[str, Any], condition: str, reason: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        made = {"type": condition, "status": "True", "reason": reason, "message": reason}
        status = {"status": {"conditions": [made | {"lastTransitionTime": now}]}}
        patch = self._custom.patch_namespaced_custom_object_status
        patch(*self._place, _name(jobset), status)


def _name(thing: dict[str, Any]) -> str:
    return str(thing["metadata"]["name"])


def _is_deleted(thing: dict[str, Any]) -> bool:
    return "deletionTimestamp" in thing["metadata"]


def _jobset_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"].get("labels", {}).get(f"{SIGS}jobset-name"))


def _pod(jobset: dict[str, Any], job: dict[str, Any], index: int, number: int) -> dict[str, Any]:
    name, template = _name(jobset), job["template"]["spec"]["template"]
    labels = {"jobset-name": name, "replicatedjob-name": job["name"]}
    labels |= {"job-index": str(index), "job-global-index": str(number)}
    owner = {"apiVersion": jobset["apiVersion"], "kind": "JobSet", "name": name}
    owner |= {"uid": jobset["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}
    metadata = template["metadata"] | {
        "name": f"{name}-{job['name']}-{index}-{uuid.uuid4().hex[:5]}",
        "labels": template["metadata"]["labels"] | {f"{SIGS}{key}": labels[key] for key in labels},
        "ownerReferences": [owner],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
