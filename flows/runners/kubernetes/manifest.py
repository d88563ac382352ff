"""Pods of a stage request: what they run, mount and may use, and what is forbidden.

Pure. No setting changes the security context: every pod holds to the level "restricted" of
Kubernetes' Pod Security Standards. Claims are mounted at the paths that the orchestrator uses.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.pipeline.kubernetes import ClaimMount, KubernetesSettings, PodSettings
from flows.runners.base import supervised, thread_variables
from flows.runners.kubernetes.images import image_file
from flows.runners.kubernetes.labels import (
    ATTEMPT,
    GROUP,
    GROUP_RETRIES,
    GROUP_SIZE,
    QUEUE,
    QUEUE_PRIORITY,
    annotations_for,
    labels_for,
)
from flows.runners.local.outputs import writable_folders
from stages.contract.errors import UserError
from stages.contract.provenance import IMAGE_FILE_VARIABLE, IMAGE_VARIABLE
from stages.contract.request import FileInput, Request


def volumes_for(settings: KubernetesSettings) -> list[dict[str, Any]]:
    """Volumes of a pod: its claims, and room that ends with it."""
    claims = {each.claim for each in settings.volumes.values()}
    shm = {"medium": "Memory", "sizeLimit": _mib(settings.shm_gib)}
    return [
        *(
            {"name": volume_name(each), "persistentVolumeClaim": {"claimName": each}}
            for each in sorted(claims)
        ),
        {"name": "tmp", "emptyDir": {"sizeLimit": _mib(settings.tmp_gib)}},
        {"name": "shm", "emptyDir": shm},
    ]


def mounts_for(
    request: Request, settings: KubernetesSettings, *, writes: bool = True
) -> list[dict[str, Any]]:
    """Mounts of a stage: claims read-only, but for what is configured and its own store folders.

    Args:
        request: The request.
        settings: The kubernetes runner's settings.
        writes: Whether it gets folders of the store to write to.

    Raises:
        UserError: The store or an input lies in no claim.
    """
    root = Path(request.store)
    _mount_of(root, settings, "the store", f"{root}: {{claim: NAME}}")
    for each in request.sources():
        if isinstance(each, FileInput):
            place = Path(each.location)
            _mount_of(place, settings, "an input", f"{place.parent}: {{claim: NAME}}")
    mounts = {
        path: _mount(each.claim, path, each.sub_path, read_only=not each.writable)
        for path, each in settings.volumes.items()
    }
    for folder in writable_folders(request) if writes else ():
        path, volume = _mount_of(folder, settings, "the store", "")
        within = (Path(volume.sub_path) / folder.relative_to(path)).as_posix()
        mounts[str(folder)] = _mount(volume.claim, str(folder), within, read_only=False)
    # A runtime mounts in this order: what is inside another mount comes after it.
    return [
        *(mounts[path] for path in sorted(mounts)),
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def volume_name(claim: str) -> str:
    """Name of a claim's volume within a pod: names of volumes have no dots."""
    return "claim-" + claim.replace(".", "-")


def _mount_of(
    place: Path, settings: KubernetesSettings, what: str, example: str
) -> tuple[Path, ClaimMount]:
    found = settings.volume_at(place)
    if found is None:
        raise UserError(
            f"{what} is at {place}, and pods see no volume there",
            f"name the claim that holds it in execution.kubernetes.volumes (`{example}`)",
        )
    return found


def _mount(claim: str, path: str, within: str, *, read_only: bool) -> dict[str, Any]:
    made = {"name": volume_name(claim), "mountPath": path, "readOnly": read_only}
    if within and within != ".":
        made["subPath"] = within
    return made


def _mib(gib: float) -> str:
    return f"{int(gib * 1024)}Mi"


CONTAINER = "stage"
# A stage is killed after its grace period; the supervisor needs a moment to see that through.
SUPERVISOR_SECONDS = 10
_HOSTNAME = "kubernetes.io/hostname"
# Taints of a node that does not answer; the cluster waits 300 seconds otherwise.
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(frozen=True)
class Attempt:
    """One attempt at a request, in one pod for each of its nodes.

    Attributes:
        name: Name that its pods share.
        image: Image, with its digest where that is known.
        uid: User of the stage.
        gid: Group of the stage.
        request_path: Request file in the store.
        sign: File that the orchestrator renews while it lives.
        grace_seconds: Time between SIGTERM and SIGKILL.
        owner: The orchestrator's own pod as an owner reference, where it is one.
    """

    name: str
    image: str
    uid: int
    gid: int
    request_path: str
    sign: Path
    grace_seconds: float
    owner: dict[str, Any] | None = None


def attempt_name(request: Request, unique: str) -> str:
    """Name of an attempt: a DNS label with room for a pod's number."""
    place = re.sub(r"[^a-z0-9]+", "-", f"{request.run}-{request.place}".lower())
    return f"geb-{place.strip('-')[:40].strip('-')}-{unique}"


def pods_for(
    request: Request, settings: KubernetesSettings, attempt: Attempt
) -> list[dict[str, Any]]:
    """Manifests of an attempt's pods: the stage's program in the first, its peers in the others.

    Raises:
        UserError: The store or an input lies in no claim.
    """
    mounts = mounts_for(request, settings)
    return [
        _pod(request, settings, attempt, node, _command(request, settings, attempt, node), mounts)
        for node in range(request.resources.nodes)
    ]


def trial_pod(request: Request, settings: KubernetesSettings, attempt: Attempt) -> dict[str, Any]:
    """Manifest of a pod that tells what a stage would see, and writes nothing.

    Raises:
        UserError: The store lies in no claim.
    """
    command = ["python", "-m", "stages.contract.health", request.store]
    mounts = mounts_for(request, settings, writes=False)
    return _pod(request, settings, attempt, 0, command, mounts)


def _pod(
    request: Request,
    settings: KubernetesSettings,
    attempt: Attempt,
    node: int,
    command: list[str],
    mounts: list[dict[str, Any]],
) -> dict[str, Any]:
    chosen = settings.pod_of(request.stage)
    labels = labels_for(request, attempt.name, node)
    annotations = annotations_for(request, settings.on_orchestrator_death)
    if chosen.queue is not None:
        labels[QUEUE] = chosen.queue
        if chosen.queue_priority is not None:
            labels[QUEUE_PRIORITY] = chosen.queue_priority
        if request.resources.nodes > 1:
            labels[GROUP] = attempt.name
            annotations[GROUP_SIZE] = str(request.resources.nodes)
            # The next attempt is a group of its own.
            annotations[GROUP_RETRIES] = "false"
    metadata: dict[str, Any] = {
        "name": f"{attempt.name}-{node}",
        "labels": labels,
        "annotations": annotations,
    }
    if attempt.owner is not None:
        metadata["ownerReferences"] = [attempt.owner]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": _spec(
            request, settings, attempt, _container(request, settings, attempt, command, mounts)
        ),
    }


def _spec(
    request: Request,
    settings: KubernetesSettings,
    attempt: Attempt,
    container: dict[str, Any],
) -> dict[str, Any]:
    chosen = settings.pod_of(request.stage)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(attempt.grace_seconds) + SUPERVISOR_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": attempt.uid,
            "runAsGroup": attempt.gid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes_for(settings),
        "nodeSelector": chosen.node_selector,
        "tolerations": _tolerations(settings, chosen),
    }
    if request.resources.timeout_seconds is not None:
        spec["activeDeadlineSeconds"] = math.ceil(request.resources.timeout_seconds)
    if request.resources.nodes > 1:
        spec["affinity"] = _apart(attempt)
    if settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in settings.pull_secrets]
    if chosen.service_account is not None:
        spec["serviceAccountName"] = chosen.service_account
    if chosen.priority_class is not None:
        spec["priorityClassName"] = chosen.priority_class
    return spec


def _container(
    request: Request,
    settings: KubernetesSettings,
    attempt: Attempt,
    command: list[str],
    mounts: list[dict[str, Any]],
) -> dict[str, Any]:
    limits = _limits(request, settings)
    return {
        "name": CONTAINER,
        "image": attempt.image,
        "imagePullPolicy": settings.pull_policy,
        "command": command,
        "env": _environment(request, settings.pod_of(request.stage), attempt),
        # The same as limits and requests: memory that is not there cannot be taken from a stage.
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": mounts,
    }


def _command(
    request: Request, settings: KubernetesSettings, attempt: Attempt, node: int
) -> list[str]:
    options = []
    if settings.on_orchestrator_death == "stop":
        options = ["--sign", str(attempt.sign)]
        options += ["--sign-seconds", str(settings.orchestrator_seconds)]
    work = str(Path(request.store) / "work" / request.stage / request.key)
    first, other = [f"stages.{request.stage}", attempt.request_path], ["stages.training.node", work]
    program = first if node == 0 else other
    return supervised("python", attempt.grace_seconds, *options, program=program)


def _environment(request: Request, chosen: PodSettings, attempt: Attempt) -> list[dict[str, Any]]:
    # Libraries ask for the user's name and home, which an image knows for its own user alone.
    plain = {"USER": "geb", "LOGNAME": "geb", "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
    plain |= thread_variables(request.resources) | chosen.environment
    plain[IMAGE_VARIABLE] = attempt.image
    if "@" not in attempt.image and attempt.request_path:
        plain[IMAGE_FILE_VARIABLE] = str(image_file(attempt.request_path))
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        # A pod's name leads nowhere on other nodes.
        {"name": "GEB_NODE_ADDRESS", "valueFrom": address},
        *(
            {
                "name": name,
                "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}},
            }
            for name, secret in chosen.secrets.items()
        ),
    ]


def _limits(request: Request, settings: KubernetesSettings) -> dict[str, str]:
    resources, limits = request.resources, {}
    if resources.cpus is not None:
        limits["cpu"] = f"{math.ceil(resources.cpus * 1000)}m"
    if resources.memory_gib is not None:
        limits["memory"] = f"{math.ceil(resources.memory_gib * 1024)}Mi"
    if resources.gpus:
        limits[settings.gpu_resource] = str(resources.gpus)
    return limits


def _tolerations(settings: KubernetesSettings, chosen: PodSettings) -> list[dict[str, Any]]:
    lost = [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": settings.node_lost_seconds,
        }
        for key in _LOST
    ]
    return [*(each.model_dump(exclude_none=True) for each in chosen.tolerations), *lost]


def _apart(attempt: Attempt) -> dict[str, Any]:
    """No two pods of an attempt on one node."""
    term = {
        "labelSelector": {"matchLabels": {ATTEMPT: attempt.name}},
        "topologyKey": _HOSTNAME,
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
