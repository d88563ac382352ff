"""Reasons why a pod is refused, does not start, or has ended, told by what the API says. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import FORBIDDEN, INTERNAL_SERVER_ERROR
from typing import Any, Literal

from kubernetes.utils.quantity import parse_quantity

from flows.runners.base import Ending
from flows.runners.kubernetes.client import RIGHTS_REMEDY
from flows.runners.kubernetes.identity import JobSet, Pod, is_jobset
from stages.contract.errors import StageFailedError, UserError

Event = dict[str, Any]

_PULL = {"ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError"}
# Answers of a registry after which no further attempt will help.
_NO_IMAGE = re.compile(
    r"not found|manifest unknown|does not exist|unauthorized|denied|forbidden|no basic auth", re.I
)
_NO_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_NO_REFERENCE = re.compile(r'(?:secret|configmap) "[^"]+" not found|couldn\'t find key', re.I)
_OWN_LIMIT = re.compile(r"exceeds the (?:total )?limit|local ephemeral storage usage", re.I)

# Conditions DisruptionTarget (Kubernetes) and TerminationTarget (Kueue), by their reason.
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "StoppedByKueue": "stopped by Kueue",
    "DeletionByTaintManager": "its node got a taint that it does not tolerate",
    "EvictionByEvictionAPI": "evicted by request: its node is drained, or its queue needs room",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "ended by its node, which shuts down or is short of something",
}
# Events of a pod that is deleted, if the API has no such conditions.
_EVENTS = {
    "Preempted": "preempted by a pod of higher priority",
    "TaintManagerEviction": "its node does not answer, or got a taint that it does not tolerate",
    "NodeNotReady": "its node does not answer",
}
# Reasons of a failed pod that its node, not its program, is the cause of.
_NODE_REASONS = {
    "NodeLost": "its node does not answer",
    "NodeShutdown": "its node shuts down",
    "Shutdown": "its node shuts down",
    "Terminated": "its node shuts down",
    "Preempting": "its node made room for a critical pod",
}


DELETED = "somebody deleted its pod (kubectl drain, kubectl delete pod)"
"""Reason of a pod's deletion if nothing tells of another one."""


@dataclass(frozen=True)
class Obstacle:
    """Something that keeps a pod from starting.

    Attributes:
        wait: How long it is worth waiting: ``never``: not at all; ``a_while``: the cluster or a
            registry may be busy; ``always``: a queue.
    """

    message: str
    remedy: str
    wait: Literal["never", "a_while", "always"] = "a_while"


def obstacle_of(pod: Pod, stage: str, events: Sequence[Event] = ()) -> Obstacle | None:
    """Obstacle that keeps a pod from a node, or its container from starting; None for none."""
    if pod["status"].get("phase") != "Pending":
        return None
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _unscheduled(pod, condition, stage)
    waiting = _container(pod).get("state", {}).get("waiting", {})
    reason, said = waiting.get("reason", ""), waiting.get("message", "")
    image = pod["spec"]["containers"][0]["image"]
    if reason in _PULL or reason in ("InvalidImageName", "ErrImageNeverPull"):
        hopeless = reason not in _PULL or _NO_IMAGE.search(said)
        return Obstacle(
            f"the image {image} cannot be had: {said or reason}",
            f"push it to where nodes find it, or correct execution.kubernetes.registry, "
            f"stages.{stage}.image or pull_secrets",
            "never" if hopeless else "a_while",
        )
    if reason in ("CreateContainerConfigError", "CreateContainerError"):
        return Obstacle(
            f"the container cannot be made: {said}",
            "create what it names in the namespace, or correct execution.kubernetes",
            "never" if _NO_REFERENCE.search(said) else "a_while",
        )
    warnings = [each for each in events if each.get("type") == "Warning"]
    if warnings:
        return Obstacle(
            f"the pod does not start: {warnings[-1].get('message', '')}",
            "correct execution.kubernetes.volumes, or mend what the message names",
        )
    return None


def _unscheduled(pod: Pod, condition: dict[str, Any], stage: str) -> Obstacle:
    said = condition.get("message", "")
    if condition.get("reason") == "SchedulingGated":
        # The scheduler does not look at it before others have taken its gates away.
        gates = [each["name"] for each in pod["spec"].get("schedulingGates") or ()]
        where = f"queued, or held back by its scheduling gates: {', '.join(gates)}"
        return Obstacle(where, "", "always")
    missing = _NO_CLAIM.search(said)
    if missing is not None:
        return Obstacle(
            f"there is no claim {missing[1]!r} in the namespace",
            "create it, or correct execution.kubernetes.volumes",
            "never",
        )
    if "unbound" in said and "PersistentVolumeClaim" in said:
        claims = [each.get("persistentVolumeClaim") for each in pod["spec"].get("volumes") or ()]
        names = ", ".join(each["claimName"] for each in claims if each)
        return Obstacle(
            f"a claim of the pod is bound to no volume: {said}",
            f"`kubectl describe pvc` says why (claims of the pod: {names}): the cluster needs a "
            "storage class that provisions volumes with the claim's access mode, or such a volume",
        )
    return Obstacle(
        f"no node takes the pod: {said or condition.get('reason', '')}",
        f"lower resources.{stage}, correct execution.kubernetes.node_selector or tolerations, "
        "or raise pending_seconds where the cluster is only busy",
    )


def obstacle_before(jobset: JobSet, stage: str, events: Sequence[Event] = ()) -> Obstacle | None:
    """Obstacle that keeps a JobSet from having a pod; ``events`` are those of the pod's Job."""
    if is_suspended(jobset):
        return Obstacle("queued: its JobSet is suspended until its queue has room", "", "always")
    for event in reversed(events):
        if event.get("reason") == "FailedCreate":
            said = event.get("message", "")
            status = FORBIDDEN if "forbidden" in said else INTERNAL_SERVER_ERROR
            error = refused(status, said, "its Job makes no pod", stage)
            if isinstance(error, UserError):
                return Obstacle(error.message, error.remedy, "never")
            return Obstacle(str(error), f"lower resources.{stage}, or have the quota raised")
    return None


def is_suspended(jobset: JobSet) -> bool:
    """True while a JobSet is to have no pods: it waits in a queue, or has lost its room."""
    return bool(jobset["spec"].get("suspend"))


def has_started(pod: Pod) -> bool:
    """True once the pod's container has a log: it runs or has run."""
    state = _container(pod).get("state", {})
    return "running" in state or "terminated" in state


def image_id_of(pod: Pod) -> str:
    """The image of the pod's container as its node names it; empty before it starts."""
    return str(_container(pod).get("imageID", ""))


def is_lost(pod: Pod) -> bool:
    """True while the pod's node does not answer: it runs, as far as is known, and is not ready."""
    running = "running" in _container(pod).get("state", {})
    ready = {each["type"]: each["status"] for each in pod["status"].get("conditions") or ()}.get(
        "Ready"
    )
    return running and ready == "False"


def is_asked_to_end(thing: Pod | JobSet) -> bool:
    """True once the pod or JobSet is deleted; a program may still save what it has."""
    return bool(thing["metadata"].get("deletionTimestamp"))


def has_ended(thing: Pod | JobSet) -> bool:
    """True once nothing of the pod or JobSet is at work."""
    if not is_jobset(thing):
        return ending_of(thing) is not None
    conditions = thing.get("status", {}).get("conditions") or ()
    done = [each["type"] for each in conditions if each["status"] == "True"]
    return "Completed" in done or "Failed" in done


def ending_of(pod: Pod) -> Ending | None:
    """End of a pod, as far as the pod itself tells it; None if it has not ended."""
    status = pod["status"]
    terminated = _container(pod).get("state", {}).get("terminated")
    if terminated is None and status.get("phase") not in ("Succeeded", "Failed"):
        return None
    code = terminated["exitCode"] if terminated else None
    reason, said = status.get("reason", ""), status.get("message", "")
    if code == 0:
        return Ending("exited", 0)
    if reason == "DeadlineExceeded":
        return Ending("overdue", code, said)
    if reason == "Evicted":
        if _OWN_LIMIT.search(said):
            message = f"evicted: {said}; raise execution.kubernetes.tmp_gib"
            return Ending("failed", code, message)
        return Ending("taken", code, f"evicted: {said}")
    if terminated and terminated.get("reason") == "OOMKilled":
        return Ending("out_of_memory", code)
    if reason in _NODE_REASONS:
        return Ending("taken", code, f"{_NODE_REASONS[reason]}: {said}")
    disruption = next(_disruptions(pod), None)
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
        return Ending("taken", None, f"its node refused it: {reason}: {said}")
    return Ending("exited", code)


def why_taken(pod: Pod | None, events: Sequence[Event]) -> str:
    """Reason for the deletion of a pod that its orchestrator did not delete."""
    for said in _disruptions(pod) if pod is not None else ():
        return said
    for event in reversed(events):
        if event.get("reason") in _EVENTS:
            return f"{_EVENTS[event['reason']]}: {event.get('message', '')}"
    if pod is not None and is_lost(pod):
        return _EVENTS["NodeNotReady"]
    return DELETED


def _disruptions(pod: Pod) -> Iterator[str]:
    for condition in pod["status"].get("conditions") or ():
        is_one = condition["type"] in ("DisruptionTarget", "TerminationTarget")
        if is_one and condition["status"] == "True":
            reason = condition.get("reason", "")
            said = condition.get("message", "")
            yield f"{_DISRUPTIONS.get(reason, reason)}: {said}"


def _container(pod: Pod) -> dict[str, Any]:
    return next(iter(pod["status"].get("containerStatuses") or ()), {})


_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)")
_UNQUOTED = re.compile(r"failed quota: (\S+): must specify (\S+)")
_NO_NAMESPACE = re.compile(r'namespaces "[^"]+" not found')
_NO_RIGHT = re.compile(r'cannot (\w+) resource "([^"]+)"')


class QuotaInUseError(StageFailedError):
    """Other pods use up the namespace's quota for now."""


def refused(status: int, said: str, where: str, stage: str) -> UserError | StageFailedError:
    """The error for a pod that the API server did not create."""
    quota = _QUOTA.search(said)
    if quota is not None:
        name, requested, used, limited = quota.groups()
        message = (
            f"{where}: the quota {name!r} of the namespace does not allow the pod: it asks for "
            f"{requested}, in use are {used}, the limit is {limited}"
        )
        if _fits_alone(requested, limited):
            return QuotaInUseError(message)
        return UserError(message, f"lower resources.{stage}, or have the quota raised")
    unquoted = _UNQUOTED.search(said)
    if unquoted is not None:
        return UserError(
            f"{where}: the quota {unquoted[1]!r} of the namespace wants {unquoted[2]} to be given",
            f"set resources.{stage}.cpus and resources.{stage}.memory_gib",
        )
    right = _NO_RIGHT.search(said)
    if right is not None:
        return UserError(
            f"{where}: the orchestrator may not {right[1]} {right[2]}: {said}", RIGHTS_REMEDY
        )
    message = f"{where}: the cluster refuses the pod: {said}"
    if "no PriorityClass" in said:
        return UserError(
            message,
            "`kubectl get priorityclasses` lists them; correct execution.kubernetes.priority_class",
        )
    if _NO_NAMESPACE.search(said):
        return UserError(message, "create it, or correct execution.kubernetes.namespace")
    if 400 <= status < 500 and status not in (408, 409, 429):
        return UserError(message, "correct execution.kubernetes or resources, or what they name")
    return StageFailedError(message)


def _fits_alone(requested: str, limited: str) -> bool:
    """True unless an amount (of ``pods=1,limits.memory=2Gi``) is above its limit."""
    limits = dict(each.split("=", 1) for each in limited.split(","))
    asked = dict(each.split("=", 1) for each in requested.split(","))
    return all(
        parse_quantity(amount) <= parse_quantity(limits[name]) for name, amount in asked.items()
    )
