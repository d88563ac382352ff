"""Names, labels and annotations by which this project's pods are known. Pure."""

from collections.abc import Mapping
from typing import Any

from stages.contract.request import Request

Pod = Mapping[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
GEB = "geb"
KEY = "geb/key"
ATTEMPT = "geb/attempt"

# Annotations: values of any length.
STORE = "geb/store"
FULL_KEY = "geb/full-key"
DEATH = "geb/on-orchestrator-death"

# The API's limit for the value of a label.
_LONGEST = 63


def selector(key: str = "") -> str:
    """Label selector of this project's pods, or of those for one key, of whatever store."""
    managed = f"{MANAGED_BY}={GEB}"
    return f"{managed},{KEY}={key[:_LONGEST]}" if key else managed


def labels_for(request: Request, attempt: str) -> dict[str, str]:
    """Labels of the pods of an attempt at a request."""
    return {
        MANAGED_BY: GEB,
        COMPONENT: request.stage,
        KEY: request.key[:_LONGEST],
        ATTEMPT: attempt,
    }


def annotations_for(request: Request, store: str, death: str) -> dict[str, str]:
    """Annotations of the pods of an attempt at a request, whose store has this identity."""
    return {
        STORE: store,
        FULL_KEY: request.key,
        DEATH: death,
    }


def name_of(pod: Pod) -> str:
    """Name of a pod."""
    return str(pod["metadata"]["name"])


def label(pod: Pod, name: str) -> str:
    """Value of a label, empty if the pod does not have it."""
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def annotation(pod: Pod, name: str) -> str:
    """Value of an annotation, empty if the pod does not have it."""
    return str((pod["metadata"].get("annotations") or {}).get(name, ""))
