"""Reasons why a pod is refused, does not start, or has ended. Pure.

Decisions follow reasons, types and codes of the API. Its messages are passed on as they are.
"""

import re
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from flows.runners.ending import Ending, describe_exit
from flows.runners.place import NoRoomError
from stages.contract.errors import EXIT_OK, EXIT_STOPPED, GebError, StageFailedError, UserError

Pod = dict[str, Any]

STAGE = "app.kubernetes.io/component"
"""Label with the name of a pod's stage."""

# Conditions of a pod that Kubernetes and Kueue take away.
_DISRUPTIONS = ("DisruptionTarget", "TerminationTarget")
# Reasons of a container whose end its node did not see.
_LOST_CONTAINERS = ("Unknown", "ContainerStatusUnknown")


def is_gated(pod: Pod) -> bool:
    """True while a queue holds the pod back from the scheduler by its scheduling gates."""
    return _condition(pod, "PodScheduled").get("reason") == "SchedulingGated"


def has_started(pod: Pod) -> bool:
    """True once the pod's container has a log: it runs or has run."""
    state = _state(pod)
    return "running" in state or "terminated" in state


def is_lost(pod: Pod) -> bool:
    """True while the pod's node does not answer: it runs, as far as is known, and is not ready."""
    return "running" in _state(pod) and _condition(pod, "Ready").get("status") == "False"


def is_asked_to_end(pod: Pod) -> bool:
    """True once the pod is deleted; its program may still save what it has."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def ending_of(pod: Pod) -> Ending | None:
    """End of a pod, as far as the pod itself tells it; None if it has not ended."""
    status = pod["status"]
    terminated = _state(pod).get("terminated", {})
    if not terminated and status.get("phase") not in ("Succeeded", "Failed"):
        return None
    code = terminated.get("exitCode")
    cause = terminated.get("reason")
    reason = status.get("reason", "")
    message = f"{reason}: {status.get('message', '')}" if reason else describe_exit(code)
    if code == EXIT_OK:
        return Ending("exited", code)
    if disruption := disruption_of(pod):
        return Ending("preempted", code, disruption)
    if reason == "Evicted":
        # Kubernetes marks a pod that its node had no room for. Otherwise a limit was its own.
        return Ending("failed", code, f"{message}; raise execution.kubernetes.tmp_gib")
    # The node shut down or started again, or a kubelet refused what the scheduler gave it.
    if reason or code in (None, EXIT_STOPPED) or cause in _LOST_CONTAINERS:
        return Ending("preempted", code, f"it was asked to end, or its node was lost ({message})")
    if cause == "OOMKilled":
        return Ending("out_of_memory", code)
    if cause in ("StartError", "ContainerCannotRun"):
        return Ending(
            "refused",
            code,
            f"the image cannot run the stage: {terminated.get('message', '')}",
            "use an image of this project, or one built on top of it",
        )
    return Ending("exited", code)


def disruption_of(pod: Pod) -> str:
    """Reason for which the cluster takes a pod away; empty if it does not."""
    for kind in _DISRUPTIONS:
        condition = _condition(pod, kind)
        if condition.get("status") == "True":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return ""


def _condition(pod: Pod, kind: str) -> dict[str, Any]:
    """The condition of a kind; empty if the pod does not have it."""
    conditions = pod["status"].get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _state(pod: Pod) -> dict[str, Any]:
    """State of the pod's container: waiting, running or terminated; empty if it has none yet."""
    containers = pod["status"].get("containerStatuses") or [{}]
    return dict(containers[0].get("state", {}))


# Statuses of an API server that is busy.
_BUSY = (408, 409, 429)
# The API gives quotas no separate reason.
_QUOTA = re.compile(r"exceeded quota: .*requested: (\S+), used: \S+, limited: (\S+)")


def refused(status: int, reason: str, where: str, num_pods: int) -> GebError:
    """The error for a pod, of ``num_pods`` that are alike, that the API server did not create."""
    message = f"{where}: the cluster refuses the pod: {reason}"
    if quota := _QUOTA.search(reason):
        remedy = "lower `resources`, or have the quota raised"
        requested, limited = map(_amounts, quota.groups())
        if any(requested[name] * num_pods > limited[name] for name in requested):
            return UserError(message, remedy)
        # The name of the pod, another one at each try, is not among these words.
        return NoRoomError(f"{where}: {quota.group()}; {remedy}")
    if 400 <= status < 500 and status not in _BUSY:
        return UserError(message, "correct execution.kubernetes or resources, or what they name")
    return StageFailedError(message)


def _amounts(words: str) -> dict[str, Decimal]:
    """Amounts of resources, `limits.cpu=2,pods=1`."""
    pairs = [word.split("=") for word in words.split(",")]
    return {name: parse_quantity(amount) for name, amount in pairs}
