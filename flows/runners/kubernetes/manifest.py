"""Pods of a stage request: what they run, mount and may use, what is forbidden.

Pure. No setting changes the security context: every pod holds to the level "restricted" of
Kubernetes' Pod Security Standards. Claims are mounted at the paths that the orchestrator uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.pipeline.placement import ClaimMount, Execution, KubernetesSettings, PodSettings
from flows.runners.command_lines import SUPERVISOR_SECONDS, thread_variables
from flows.runners.images import image_tags
from flows.runners.kubernetes.identity import (
    ATTEMPT,
    COMPONENT,
    DEATH,
    GEB,
    KEY,
    MANAGED_BY,
    STORE,
)
from flows.runners.place import node_commands, writable_folders
from stages.contract.errors import UserError
from stages.contract.manifest import IMAGE_VARIABLE
from stages.contract.request import FileInput, Request
from stages.harness.from_bucket import OWNER_VARIABLE, SYNC_SECONDS_VARIABLE
from stages.store.opening import CACHE_VARIABLE
from stages.store.remote.sync import owner_of

# The store's local folder in a pod that has no other.
_CACHE = "/geb-cache"


def _mounts_for(attempt: PodGroup) -> list[dict[str, Any]]:
    """Mounts of a stage: claims are read-only, except writable ones and its own store folders."""
    settings = attempt.execution.kubernetes
    mounts = {
        path: _mount(volume.claim, path, volume.sub_path, read_only=not volume.writable)
        for path, volume in settings.volumes.items()
    }
    if attempt.fetches:
        mounts[_CACHE] = {"name": "cache", "mountPath": _CACHE}
    else:
        mounts |= _shared_mounts(attempt.request, settings)
    # A runtime mounts in this order: what is inside another mount comes after it.
    return [
        *(mounts[path] for path in sorted(mounts)),
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def _shared_mounts(request: Request, settings: KubernetesSettings) -> dict[str, dict[str, Any]]:
    """Mounts of the store's folders that a stage writes to; it must see store and inputs."""
    root = Path(request.store)
    _mount_of(root, settings, "the store", f"{root}: {{claim: NAME}}")
    for source in request.sources():
        if isinstance(source, FileInput):
            path = Path(source.location)
            _mount_of(path, settings, "an input", f"{path.parent}: {{claim: NAME}}")
    mounts = {}
    for folder in writable_folders(request):
        path, volume = _mount_of(folder, settings, "the store", "")
        within = (Path(volume.sub_path) / folder.relative_to(path)).as_posix()
        mounts[str(folder)] = _mount(volume.claim, str(folder), within, read_only=False)
    return mounts


def _mount_of(
    location: Path, settings: KubernetesSettings, what: str, example: str
) -> tuple[Path, ClaimMount]:
    volume = settings.volume_at(location)
    if volume is None:
        raise UserError(
            f"{what} is at {location}, and pods see no volume there",
            f"name the claim that holds it in execution.kubernetes.volumes (`{example}`), or put "
            "the store into a bucket",
        )
    return volume


def _mount(claim: str, path: str, within: str, *, read_only: bool) -> dict[str, Any]:
    mount = {"name": _volume_name(claim), "mountPath": path, "readOnly": read_only}
    if within and within != ".":
        mount["subPath"] = within
    return mount


def _volume_name(claim: str) -> str:
    # Names of volumes have no dots.
    return "claim-" + claim.replace(".", "-")


def _volumes_for(attempt: PodGroup) -> list[dict[str, Any]]:
    """Volumes of a pod: its claims, and room that ends with it."""
    settings = attempt.execution.kubernetes
    chosen = attempt.settings
    return [
        *([{"name": "cache", "emptyDir": {}}] if attempt.fetches else ()),
        *(
            {"name": _volume_name(claim), "persistentVolumeClaim": {"claimName": claim}}
            for claim in sorted({volume.claim for volume in settings.volumes.values()})
        ),
        {"name": "tmp", "emptyDir": {"sizeLimit": _mib(chosen.tmp_gib)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _mib(chosen.shm_gib)}},
    ]


def _mib(gib: float) -> str:
    return f"{int(gib * 1024)}Mi"


_HOSTNAME = "kubernetes.io/hostname"
# Taints of a node that does not answer; the cluster waits 300 seconds otherwise.
_LOST_SECONDS = 60
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(frozen=True)
class PodGroup:
    """One attempt at a request, in one pod for each of its nodes.

    Attributes:
        name: Name that its pods share.
        request_path: Request in the store: a file, or an object of a bucket for pods that fetch and
            send by themselves.
        store: Identity of the store.
    """

    request: Request
    execution: Execution
    name: str
    user: tuple[int, int]
    request_path: str
    store: str

    @property
    def fetches(self) -> bool:
        """True if its pods share no folder with the orchestrator."""
        return "://" in self.request_path

    @property
    def settings(self) -> PodSettings:
        """Settings of the stage's pods."""
        return self.execution.kubernetes.pod_of(self.request.stage)

    @property
    def image(self) -> str:
        """The image by name: this project's own, or the one that is configured."""
        if self.settings.image is not None:
            return self.settings.image
        tag = image_tags(self.request.image, gpus=self.request.resources.gpus)[0]
        registry = self.execution.kubernetes.registry.rstrip("/")
        return f"{registry}/{tag}" if registry else tag


def pods_for(attempt: PodGroup) -> list[dict[str, Any]]:
    """Manifests of an attempt's pods: the stage's program in the first, its peers in the others.

    Raises:
        UserError: The store or an input lies in no claim.
    """
    mounts = _mounts_for(attempt)
    path = attempt.request_path
    execution = attempt.execution
    commands = node_commands("python", attempt.request, execution, path, _CACHE)
    return [_pod(attempt, node, command, mounts) for node, command in enumerate(commands)]


def _pod(
    attempt: PodGroup, node: int, command: list[str], mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    request = attempt.request
    limits = _limits(attempt)
    container = {
        "name": "stage",
        "image": attempt.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": _environment(attempt),
        # The same as limits and requests: memory that is not there cannot be taken from a stage.
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    metadata = {
        "name": f"{attempt.name}-{node}",
        # What the runner finds its pods by comes last, so that no setting changes it.
        "labels": attempt.settings.labels
        | {
            MANAGED_BY: GEB,
            COMPONENT: request.stage,
            ATTEMPT: attempt.name,
        },
        "annotations": {
            STORE: attempt.store,
            KEY: request.key,
            DEATH: attempt.execution.on_orchestrator_death,
        },
    }
    spec = _spec(attempt, container)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _spec(attempt: PodGroup, container: dict[str, Any]) -> dict[str, Any]:
    chosen = attempt.settings
    resources = attempt.request.resources
    settings = attempt.execution.kubernetes
    grace_seconds = attempt.execution.grace_seconds
    wait = {"tolerationSeconds": _LOST_SECONDS}
    lost = [{"key": key, "operator": "Exists", "effect": "NoExecute"} | wait for key in _LOST]
    uid, gid = attempt.user
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(grace_seconds) + SUPERVISOR_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": uid,
            "runAsGroup": gid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": _volumes_for(attempt),
        "tolerations": [*chosen.spec.get("tolerations", ()), *lost],
    }
    if resources.nodes > 1:
        # No two pods of an attempt on one node.
        term = {
            "labelSelector": {"matchLabels": {ATTEMPT: attempt.name}},
            "topologyKey": _HOSTNAME,
        }
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        spec["affinity"] = {"podAntiAffinity": rule}
    if settings.fs_group is not None:
        # A large store takes minutes otherwise, at the start of each pod.
        spec["securityContext"] |= {
            "fsGroup": settings.fs_group,
            "fsGroupChangePolicy": "OnRootMismatch",
        }
    return chosen.spec | spec


def _environment(attempt: PodGroup) -> list[dict[str, Any]]:
    chosen = attempt.settings
    # Libraries ask for the user's name and home, which an image knows for its own user alone.
    plain = {"USER": "geb", "LOGNAME": "geb", "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
    plain |= thread_variables(attempt.request.resources) | chosen.environment
    plain[IMAGE_VARIABLE] = attempt.image
    if attempt.fetches:
        plain[CACHE_VARIABLE] = _CACHE
        plain[OWNER_VARIABLE] = owner_of(attempt.store)
        plain[SYNC_SECONDS_VARIABLE] = str(attempt.execution.sync_seconds)
    # A pod's name leads nowhere on other nodes.
    sources = {"GEB_NODE_ADDRESS": {"fieldRef": {"fieldPath": "status.podIP"}}} | {
        name: {"secretKeyRef": dict(zip(("name", "key"), secret.split("/"), strict=True))}
        for name, secret in chosen.secrets.items()
    }
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *({"name": name, "valueFrom": source} for name, source in sources.items()),
    ]


def _limits(attempt: PodGroup) -> dict[str, str]:
    resources = attempt.request.resources
    chosen = attempt.settings
    limits = {name: str(amount) for name, amount in chosen.extra_resources.items()}
    if resources.cpus is not None:
        limits["cpu"] = f"{math.ceil(resources.cpus * 1000)}m"
    if resources.memory_gib is not None:
        limits["memory"] = f"{math.ceil(resources.memory_gib * 1024)}Mi"
    if resources.gpus:
        limits[chosen.gpu_resource] = str(resources.gpus)
    return limits
