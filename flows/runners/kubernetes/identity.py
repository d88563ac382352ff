"""Names, labels and annotations by which this project's pods and JobSets are known. Pure."""

import hashlib
from collections.abc import Mapping
from typing import Any

from stages.contract.request import Request

Pod = Mapping[str, Any]
JobSet = Mapping[str, Any]

JOBSET_API = ("jobset.x-k8s.io", "v1alpha2")
"""Group and version of the API of JobSets."""
_JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
_JOB_INDEX = "jobset.sigs.k8s.io/job-index"
KUEUE = "kueue.x-k8s.io/"
"""Beginning of Kueue's labels: it admits a JobSet as a whole, by the labels of the JobSet."""

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
GEB = "geb"
STORE = "geb/store"
KEY = "geb/key"
ATTEMPT = "geb/attempt"
NODE = "geb/node"

# Annotations: values of any length.
STORE_PLACE = "geb/store-place"
FULL_KEY = "geb/full-key"
NODES = "geb/nodes"
DEATH = "geb/on-orchestrator-death"

# The API's limit for the value of a label.
_LONGEST = 63


def store_label(place: str) -> str:
    """Short digest of a store's place."""
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def selector(store: str | None = None, key: str | None = None) -> str:
    """Label selector of this project's pods; of one store, and of one key, if they are given."""
    wanted = {MANAGED_BY: GEB}
    if store is not None:
        wanted[STORE] = store_label(store)
    if key is not None:
        wanted[KEY] = key[:_LONGEST]
    return ",".join(f"{name}={value}" for name, value in wanted.items())


def labels_for(request: Request, store: str, attempt: str, node: int) -> dict[str, str]:
    """Labels of one pod of an attempt at a request, whose store has this identity."""
    return {
        MANAGED_BY: GEB,
        COMPONENT: request.stage,
        STORE: store_label(store),
        KEY: request.key[:_LONGEST],
        ATTEMPT: attempt,
        NODE: str(node),
    }


def annotations_for(request: Request, store: str, death: str) -> dict[str, str]:
    """Annotations of one pod of an attempt at a request, whose store has this identity."""
    return {
        STORE_PLACE: store,
        FULL_KEY: request.key,
        NODES: str(request.resources.nodes),
        DEATH: death,
    }


def name_of(thing: Pod | JobSet) -> str:
    """Name of a pod or JobSet."""
    return str(thing["metadata"]["name"])


def is_jobset(thing: Pod | JobSet) -> bool:
    """True for a JobSet; pods of a list do not name their kind."""
    return thing.get("kind") == "JobSet"


def jobset_of(pod: Pod) -> str:
    """Name of a pod's JobSet, empty if it has none."""
    return label(pod, _JOBSET_NAME)


def place_of(thing: Pod | JobSet) -> str:
    """An attempt's name for its JobSet, and the name with the number of its node for a pod.

    Pods of a JobSet share the label of their template, and differ by the index of their Job.
    """
    attempt = label(thing, ATTEMPT)
    if is_jobset(thing):
        return attempt
    return f"{attempt}-{int(label(thing, NODE)) + int(label(thing, _JOB_INDEX) or 0)}"


def job_of(attempt: str, node: int) -> str:
    """Name of the Job that a JobSet makes for a node of an attempt."""
    return f"{attempt}-others-{node - 1}" if node else f"{attempt}-first-0"


def label(thing: Pod | JobSet, name: str) -> str:
    """Value of a label, empty if the pod or JobSet does not have it."""
    return str((thing["metadata"].get("labels") or {}).get(name, ""))


def annotation(thing: Pod | JobSet, name: str) -> str:
    """Value of an annotation, empty if the pod or JobSet does not have it."""
    return str((thing["metadata"].get("annotations") or {}).get(name, ""))
