"""Names, labels and annotations by which this project's pods are known. Pure."""

from collections.abc import Mapping
from typing import Any

Pod = Mapping[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
GEB = "geb"
ATTEMPT = "geb/attempt"

SELECTOR = f"{MANAGED_BY}={GEB}"
"""Label selector of this project's pods, of whatever store."""

# Annotations: values of any length.
STORE = "geb/store"
KEY = "geb/key"


def name_of(pod: Pod) -> str:
    """Name of a pod."""
    return str(pod["metadata"]["name"])


def label(pod: Pod, name: str) -> str:
    """Value of a label, empty if the pod does not have it."""
    return str((pod["metadata"].get("labels") or {}).get(name, ""))


def annotation(pod: Pod, name: str) -> str:
    """Value of an annotation, empty if the pod does not have it."""
    return str((pod["metadata"].get("annotations") or {}).get(name, ""))
