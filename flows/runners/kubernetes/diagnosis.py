"""Reasons why a pod is refused, does not start, or has ended. Pure.

Decisions follow reasons, types and codes of the API. Its messages are passed on as they are.
"""

from collections.abc import Sequence
from typing import Any

from flows.runners.ending import Ending
from flows.runners.kubernetes.identity import Pod
from flows.runners.place import NoRoomError
from stages.contract.errors import EXIT_STOPPED, GebError, StageFailedError, UserError

PodEvent = dict[str, Any]

# Conditions of a pod that Kubernetes and Kueue take away.
_DISRUPTIONS = ("DisruptionTarget", "TerminationTarget")
# Reasons of a container whose end its node did not see.
_LOST_CONTAINERS = ("Unknown", "ContainerStatusUnknown")
_LAST_EVENTS = 3


def last_events(events: Sequence[PodEvent]) -> str:
    """The last events of a pod, in the cluster's words."""
    return "; ".join(
        f"{event.get('reason', '')}: {event.get('message', '')}" for event in events[-_LAST_EVENTS:]
    )


def last_warnings(events: Sequence[PodEvent]) -> str:
    """The last warnings of a pod, in the cluster's words; empty if there are none."""
    return last_events([event for event in events if event.get("type") == "Warning"])


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
    terminated = _state(pod).get("terminated")
    if terminated is None and status.get("phase") not in ("Succeeded", "Failed"):
        return None
    code = terminated["exitCode"] if terminated else None
    reason = status.get("reason", "")
    message = f"{reason}: {status.get('message', '')}"
    if code == 0:
        return Ending("exited", 0)
    if disruption := _disruption(pod):
        return Ending("taken", code, disruption)
    if reason == "Evicted":
        # Kubernetes marks a pod that its node had no room for. Otherwise a limit was its own.
        return Ending("failed", code, f"{message}; raise execution.kubernetes.tmp_gib")
    if reason or terminated is None:
        # The node shut down, or a kubelet refused what the scheduler gave it: OutOfcpu, ….
        return Ending("taken", code, f"its node ended or refused it: {message}")
    if code == EXIT_STOPPED:
        return Ending(
            "taken", code, "it was asked to end, by its node or for lack of a sign of life"
        )
    if terminated.get("reason") in _LOST_CONTAINERS:
        return Ending("taken", code, "its node started again")
    if terminated.get("reason") == "OOMKilled":
        return Ending("out_of_memory", code)
    if terminated.get("reason") in ("StartError", "ContainerCannotRun"):
        return Ending(
            "refused",
            code,
            f"the image cannot run the stage: {terminated.get('message', '')}",
            "use an image of this project, or one built on top of it",
        )
    return Ending("exited", code)


def why_taken(pod: Pod | None, events: Sequence[PodEvent]) -> str:
    """Reason for the deletion of a pod that its orchestrator did not delete."""
    if pod is not None and (disruption := _disruption(pod)):
        return disruption
    if pod is not None and is_lost(pod):
        return "its node does not answer"
    message = "its pod was deleted (kubectl delete pod, kubectl drain)"
    return f"{message}; its last events: {last_events(events)}" if events else message


def _disruption(pod: Pod) -> str:
    """Reason for which the cluster takes a pod away; empty if it does not."""
    for kind in _DISRUPTIONS:
        condition = _condition(pod, kind)
        if condition.get("status") == "True":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return ""


def _condition(pod: Pod, kind: str) -> dict[str, Any]:
    """The condition of a kind; empty if the pod does not have it."""
    conditions = pod["status"].get("conditions") or ()
    for condition in conditions:
        if condition["type"] == kind:
            return dict(condition)
    return {}


def _state(pod: Pod) -> dict[str, Any]:
    """State of the pod's container: waiting, running or terminated."""
    for container in pod["status"].get("containerStatuses") or ():
        return dict(container.get("state", {}))
    return {}


# Statuses of an API server that is busy.
_BUSY = (408, 409, 429)
# The API gives quotas no separate reason.
_QUOTA = "exceeded quota"
_QUOTA_POLL_SECONDS = 5.0


def refused(status: int, reason: str, where: str) -> GebError:
    """The error for a pod that the API server did not create."""
    message = f"{where}: the cluster refuses the pod: {reason}"
    if _QUOTA in reason:
        remedy = "lower `resources`, or have the quota raised"
        return NoRoomError(f"{message}; {remedy}", _QUOTA_POLL_SECONDS)
    if 400 <= status < 500 and status not in _BUSY:
        return UserError(message, "correct execution.kubernetes or resources, or what they name")
    return StageFailedError(message)
