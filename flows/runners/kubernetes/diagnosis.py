"""Reasons why a pod is refused, does not start, or has ended. Pure.

Decisions follow reasons, types and codes of the API. Its messages are passed on as they are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from flows.runners.base import Ending
from flows.runners.kubernetes.identity import Pod
from stages.contract.errors import StageFailedError, UserError

Event = dict[str, Any]

# Reasons of a failed pod whose node, not its program, is the cause.
_NODE_REASONS = ("NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting")
# Conditions of a pod that Kubernetes and Kueue take away.
_DISRUPTIONS = ("DisruptionTarget", "TerminationTarget")
_LAST_EVENTS = 3


def is_gated(pod: Pod) -> bool:
    """True while a queue holds the pod back from the scheduler by its scheduling gates."""
    return _unscheduled(pod).get("reason") == "SchedulingGated"


def why_pending(pod: Pod, events: Sequence[Event]) -> str:
    """Reason for which a pod does not start, in the cluster's words; empty if there is none."""
    if unscheduled := _unscheduled(pod):
        reason = unscheduled.get("reason", "")
        return f"no node takes the pod: {unscheduled.get('message') or reason}"
    waiting = _container(pod).get("state", {}).get("waiting", {})
    if waiting.get("message"):
        return f"{waiting.get('reason', '')}: {waiting['message']}"
    is_warned = any(event.get("type") == "Warning" for event in events)
    return last_events(events) if is_warned else ""


def _unscheduled(pod: Pod) -> dict[str, Any]:
    """The condition that keeps a pod from a node; empty if there is none."""
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return dict(condition)
    return {}


def last_events(events: Sequence[Event]) -> str:
    """The last events of a pod, in the cluster's words."""
    return "; ".join(
        f"{event.get('reason', '')}: {event.get('message', '')}" for event in events[-_LAST_EVENTS:]
    )


def has_started(pod: Pod) -> bool:
    """True once the pod's container has a log: it runs or has run."""
    state = _container(pod).get("state", {})
    return "running" in state or "terminated" in state


def is_lost(pod: Pod) -> bool:
    """True while the pod's node does not answer: it runs, as far as is known, and is not ready."""
    running = "running" in _container(pod).get("state", {})
    ready = {each["type"]: each["status"] for each in pod["status"].get("conditions") or ()}.get(
        "Ready"
    )
    return running and ready == "False"


def is_asked_to_end(pod: Pod) -> bool:
    """True once the pod is deleted; its program may still save what it has."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def has_ended(pod: Pod) -> bool:
    """True once nothing of the pod is at work."""
    return ending_of(pod) is not None


def ending_of(pod: Pod) -> Ending | None:
    """End of a pod, as far as the pod itself tells it; None if it has not ended."""
    status = pod["status"]
    terminated = _container(pod).get("state", {}).get("terminated")
    if terminated is None and status.get("phase") not in ("Succeeded", "Failed"):
        return None
    code = terminated["exitCode"] if terminated else None
    reason = status.get("reason", "")
    message = f"{reason}: {status.get('message', '')}"
    if code == 0:
        return Ending("exited", 0)
    if reason == "DeadlineExceeded":
        return Ending("overdue", code, message)
    disruption = next(_disruptions(pod), None)
    if reason == "Evicted" and disruption is None:
        # Kubernetes marks a pod that its node had no room for. Otherwise a limit was its own.
        return Ending("failed", code, f"{message}; raise execution.kubernetes.tmp_gib")
    if terminated and terminated.get("reason") == "OOMKilled":
        return Ending("out_of_memory", code)
    if reason in _NODE_REASONS:
        return Ending("taken", code, message)
    if disruption is not None:
        return Ending("taken", code, disruption)
    if terminated and terminated.get("reason") in ("StartError", "ContainerCannotRun"):
        return Ending(
            "refused",
            code,
            f"the image cannot run the stage: {terminated.get('message', '')}",
            "use an image of this project, or one built on top of it",
        )
    if terminated is None and reason:
        # A kubelet may refuse what the scheduler gave it: OutOfcpu, NodeAffinity, ….
        return Ending("taken", None, f"its node refused it: {message}")
    return Ending("exited", code)


def why_taken(pod: Pod | None, events: Sequence[Event]) -> str:
    """Reason for the deletion of a pod that its orchestrator did not delete."""
    for disruption in _disruptions(pod) if pod is not None else ():
        return disruption
    if pod is not None and is_lost(pod):
        return "its node does not answer"
    message = "its pod was deleted (kubectl delete pod, kubectl drain)"
    return f"{message}; its last events: {last_events(events)}" if events else message


def _disruptions(pod: Pod) -> Iterator[str]:
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] in _DISRUPTIONS and condition["status"] == "True":
            yield f"{condition.get('reason', '')}: {condition.get('message', '')}"


def _container(pod: Pod) -> dict[str, Any]:
    return next(iter(pod["status"].get("containerStatuses") or ()), {})


# Statuses of an API server that is busy.
_BUSY = (408, 409, 429)
# The API gives quotas no separate reason.
_QUOTA = "exceeded quota"


class QuotaError(UserError):
    """The namespace's quota has no room for a pod, for now or at all."""


def refused(status: int, reason: str, where: str) -> UserError | StageFailedError:
    """The error for a pod that the API server did not create."""
    message = f"{where}: the cluster refuses the pod: {reason}"
    if _QUOTA in reason:
        return QuotaError(message, "lower the stage's `resources`, or have the quota raised")
    if 400 <= status < 500 and status not in _BUSY:
        return UserError(message, "correct execution.kubernetes or resources, or what they name")
    return StageFailedError(message)
