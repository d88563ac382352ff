"""Pods of a stage request: what they run, mount and may use, what is forbidden.

Pure. No setting changes the security context: every pod holds to the level "restricted" of
Kubernetes' Pod Security Standards. Claims are mounted at the paths that the orchestrator uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from flows.pipeline.placement import ClaimMount, Execution, KubernetesSettings, PodSettings
from flows.runners.command_lines import SUPERVISOR_SECONDS, thread_variables
from flows.runners.images import image_tags
from flows.runners.kubernetes.diagnosis import Pod
from flows.runners.place import node_commands, writable_folders
from stages.contract.digests import sha256_of
from stages.contract.errors import UserError
from stages.contract.manifest import IMAGE_VARIABLE
from stages.contract.request import FileInput, Request
from stages.harness.from_bucket import OWNER_VARIABLE, SYNC_SECONDS_VARIABLE
from stages.store.opening import CACHE_VARIABLE

ATTEMPT = "geb/attempt"
"""Label with the name of an attempt, which its pods share."""
WORK = "geb/work"
"""Label of all attempts at a key of a store."""
_TEMPLATE = Template(files(__package__).joinpath("pod.yaml").read_text())
# The store's local folder in a pod that has no other.
_CACHE = "/geb-cache"


def work_label(store: str, key: str) -> str:
    """Value of the label ``WORK`` for a key of the store of this identity."""
    return sha256_of([store, key])[:40]


def _mounts_for(group: PodGroup) -> list[dict[str, Any]]:
    """Mounts of a stage: claims are read-only, except writable ones and its own store folders."""
    settings = group.execution.kubernetes
    mounts = {
        path: _mount(volume.claim, path, volume.sub_path, read_only=not volume.writable)
        for path, volume in settings.volumes.items()
    }
    if group.fetches:
        mounts[_CACHE] = {"name": "cache", "mountPath": _CACHE}
    else:
        mounts |= _shared_mounts(group.request, settings)
    # A runtime mounts in this order: what is inside another mount comes after it.
    return [mounts[path] for path in sorted(mounts)]


def _shared_mounts(request: Request, settings: KubernetesSettings) -> dict[str, dict[str, Any]]:
    """Mounts of the store's folders that a stage writes to; it must see store and inputs."""
    for source in request.sources():
        if isinstance(source, FileInput):
            _volume_of(Path(source.location), settings)
    mounts = {}
    for folder in writable_folders(request):
        path, volume = _volume_of(folder, settings)
        within = (Path(volume.sub_path) / folder.relative_to(path)).as_posix()
        mounts[str(folder)] = _mount(volume.claim, str(folder), within, read_only=False)
    return mounts


def _volume_of(location: Path, settings: KubernetesSettings) -> tuple[Path, ClaimMount]:
    volume = settings.volume_at(location)
    if volume is None:
        raise UserError(
            f"{location} lies in no volume of the pods",
            "name the claim that holds it in execution.kubernetes.volumes (`{FOLDER: {claim: "
            "NAME}}`), or put the store into a bucket",
        )
    return volume


def _mount(claim: str, path: str, within: str, *, read_only: bool) -> dict[str, Any]:
    return {
        "name": _volume_name(claim),
        "mountPath": path,
        "readOnly": read_only,
        "subPath": within,
    }


def _volume_name(claim: str) -> str:
    # Names of volumes are shorter than a claim's may be, and have no dots.
    return f"claim-{sha256_of(claim)[:16]}"


def _volumes_for(group: PodGroup) -> list[dict[str, Any]]:
    """Volumes of a pod: its claims, and room for what it fetches."""
    volumes: list[dict[str, Any]] = []
    if group.fetches:
        volumes.append({"name": "cache", "emptyDir": {}})
    claims = {volume.claim for volume in group.execution.kubernetes.volumes.values()}
    for claim in sorted(claims):
        source = {"claimName": claim}
        volumes.append({"name": _volume_name(claim), "persistentVolumeClaim": source})
    return volumes


def _mib(gib: float) -> str:
    return f"{math.ceil(gib * 1024)}Mi"


@dataclass(frozen=True)
class PodGroup:
    """One attempt at a request, in one pod for each of its nodes.

    Attributes:
        name: Name that its pods share.
        request_path: Request in the store: a file, or an object of a bucket for pods that fetch and
            send by themselves.
        store: Identity of the store.
        owner: Id of the orchestrator's local folder, to whose signs of life such pods listen.
    """

    request: Request
    execution: Execution
    name: str
    user: tuple[int, int]
    request_path: str
    store: str
    owner: str

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


def pods_for(group: PodGroup) -> list[Pod]:
    """Manifests of an attempt's pods: the stage's program in the first, its peers in the others.

    Raises:
        UserError: The store or an input lies in no claim.
    """
    mounts = _mounts_for(group)
    path = group.request_path
    execution = group.execution
    commands = node_commands("python", group.request, execution, path, _CACHE)
    return [_pod(group, node, command, mounts) for node, command in enumerate(commands)]


def _pod(group: PodGroup, node: int, command: list[str], mounts: list[dict[str, Any]]) -> Pod:
    execution = group.execution
    chosen = group.settings
    uid, gid = group.user
    text = _TEMPLATE.substitute(
        name=group.name,
        node=node,
        stage=group.request.stage,
        work=work_label(group.store, group.request.key),
        seconds_to_end=math.ceil(execution.grace_seconds) + SUPERVISOR_SECONDS,
        uid=uid,
        gid=gid,
        tmp=_mib(chosen.tmp_gib),
        shm=_mib(chosen.shm_gib),
    )
    pod: Pod = yaml.safe_load(text)
    # The runner's own labels come last, so that no setting changes them.
    pod["metadata"]["labels"] = chosen.labels | pod["metadata"]["labels"]
    spec = pod["spec"]
    # The same as limits and requests: memory that is not there cannot be taken from a stage.
    limits = _limits(group)
    [container] = spec["containers"]
    container["image"] = group.image
    container["command"] = command
    container["env"] = _environment(group, container["env"])
    container["resources"] = {"limits": limits, "requests": limits}
    container["volumeMounts"] = [*mounts, *container["volumeMounts"]]
    spec["volumes"] += _volumes_for(group)
    if execution.kubernetes.fs_group is not None:
        spec["securityContext"]["fsGroup"] = execution.kubernetes.fs_group
    # Kubernetes takes the first toleration that matches a taint.
    spec["tolerations"] = [*chosen.spec.get("tolerations", ()), *spec["tolerations"]]
    pod["spec"] = chosen.spec | spec
    return pod


def _environment(group: PodGroup, fixed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Environment variables of a pod: fixed and plain ones, and references to secrets.

    A plain one replaces the fixed one of its name.
    """
    chosen = group.settings
    plain = thread_variables(group.request.resources) | chosen.environment
    plain[IMAGE_VARIABLE] = group.image
    if group.fetches:
        plain[CACHE_VARIABLE] = _CACHE
        plain[OWNER_VARIABLE] = group.owner
        plain[SYNC_SECONDS_VARIABLE] = str(group.execution.sync_seconds)
    variables = [variable for variable in fixed if variable["name"] not in plain]
    for name, value in plain.items():
        variables.append({"name": name, "value": value})
    for name, reference in chosen.secrets.items():
        secret, _, key = reference.partition("/")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        variables.append({"name": name, "valueFrom": source})
    return variables


def _limits(group: PodGroup) -> dict[str, str]:
    """Resources of a pod, which are its limits and its requests."""
    resources = group.request.resources
    chosen = group.settings
    limits = {name: str(amount) for name, amount in chosen.extra_resources.items()}
    if resources.cpus is not None:
        limits["cpu"] = f"{math.ceil(resources.cpus * 1000)}m"
    if resources.memory_gib is not None:
        limits["memory"] = _mib(resources.memory_gib)
    if resources.gpus:
        limits[chosen.gpu_resource] = str(resources.gpus)
    return limits
