"""Labels and annotations of pods, by which a runner, the reaper and people find them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from stages.contract.request import Request

Pod = Mapping[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
GEB = "geb"
STORE = "geb/store"
KEY = "geb/key"
ATTEMPT = "geb/attempt"
NODE = "geb/node"
RUN = "geb/run"

# Annotations: values of any length.
STORE_PLACE = "geb/store-place"
FULL_KEY = "geb/full-key"
STEP = "geb/step"
NODES = "geb/nodes"
DEATH = "geb/on-orchestrator-death"

# https://kueue.sigs.k8s.io/docs/reference/labels-and-annotations. Without its annotation for fast
# admission Kueue admits a group when all of its pods are there.
KUEUE = "kueue.x-k8s.io/"
QUEUE = KUEUE + "queue-name"
QUEUE_PRIORITY = KUEUE + "priority-class"
GROUP = KUEUE + "pod-group-name"
GROUP_SIZE = KUEUE + "pod-group-total-count"
GROUP_RETRIES = KUEUE + "retriable-in-group"

# The API's limit for the value of a label.
_LONGEST = 63


def label_value(text: str) -> str:
    """A text as the value of a label: what the API does not allow there becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_LONGEST].strip("-_.")


def store_label(place: str) -> str:
    """Short digest of a store's place."""
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def selector(store: str | None = None, key: str | None = None) -> str:
    """Label selector of this project's pods; of one store, and of one key, where they are given."""
    wanted = {MANAGED_BY: GEB}
    if store is not None:
        wanted[STORE] = store_label(store)
    if key is not None:
        wanted[KEY] = key[:_LONGEST]
    return ",".join(f"{name}={value}" for name, value in wanted.items())


def labels_for(request: Request, attempt: str, node: int) -> dict[str, str]:
    """Labels of one pod of an attempt."""
    return {
        MANAGED_BY: GEB,
        COMPONENT: request.stage,
        STORE: store_label(request.store),
        KEY: request.key[:_LONGEST],
        ATTEMPT: attempt,
        NODE: str(node),
        RUN: label_value(request.run),
    }


def annotations_for(request: Request, death: str) -> dict[str, str]:
    """Annotations of one pod of an attempt."""
    return {
        STORE_PLACE: request.store,
        FULL_KEY: request.key,
        STEP: request.step,
        NODES: str(request.resources.nodes),
        DEATH: death,
    }


def name_of(pod: Pod) -> str:
    """Name of a pod."""
    return str(pod["metadata"]["name"])


def label(pod: Pod, name: str) -> str:
    """Value of a label, empty where the pod does not have it."""
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def annotation(pod: Pod, name: str) -> str:
    """Value of an annotation, empty where the pod does not have it."""
    return str((pod["metadata"].get("annotations") or {}).get(name, ""))
