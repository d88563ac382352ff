"""Settings of the kubernetes runner. None of them can take a pod's hardening away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from flows.pipeline.by_stage import fields_for_stage
from stages.contract.params import Settings


def _absolute(path: str) -> str:
    """A path as it is compared with others; one that starts at a folder of its own is refused."""
    if not Path(path).is_absolute():
        raise ValueError(f"{path!r} is not an absolute path")
    return str(Path(path))


class ClaimMount(Settings):
    """A persistent volume claim, or a folder of it, as stages and orchestrator see it."""

    claim: str
    """Name of the claim, in the namespace of the pods."""
    sub_path: str = ""
    """Folder of the claim; empty for all of it."""
    writable: bool = False
    """Write access of stages to the whole claim. Their own folders of the store need none."""


class SecretKey(Settings):
    """One value of a Kubernetes secret."""

    name: str
    """Name of the secret, in the namespace of the pods."""
    key: str
    """Key within it."""


class Toleration(Settings):
    """A taint of nodes that pods accept."""

    key: str | None = None
    """Key of the taint; unset stands for every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Comparison with the taint: its value is `value`, or the taint exists with any value."""
    value: str | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; unset stands for every effect."""


class PodSettings(Settings):
    """Settings of pods that may differ from stage to stage."""

    image: str | None = None
    """Image; unset takes this project's own, of `registry`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that do not keep the pods away."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables, for all to see: nothing secret."""
    secrets: dict[str, SecretKey] = Field(default_factory=dict)
    """Environment variables whose values are in Kubernetes secrets."""
    service_account: str | None = None
    """Service account; its token is not mounted."""
    priority_class: str | None = None
    """Priority class."""
    queue: str | None = None
    """Local queue of Kueue, which admits pods by quotas; the pods of a training on several nodes
    are one group there."""
    queue_priority: str | None = None
    """Workload priority class of Kueue."""


class KubernetesSettings(PodSettings):
    """Pods of the kubernetes runner. Limits of memory, CPUs, GPUs and time are in `resources`."""

    stages: dict[str, PodSettings] = Field(default_factory=dict)
    """Settings of single stages by their names, over the settings beside this one."""
    kubeconfig: str | None = None
    """Configuration file of the cluster; unset takes KUBECONFIG or `~/.kube/config`, or within a
    pod its service account."""
    context: str | None = None
    """Context of that file; unset takes its current one."""
    namespace: str | None = None
    """Namespace of the pods; unset takes the context's, or the orchestrator's pod's own."""
    registry: str = ""
    """Registry and folder of this project's images, such as `ghcr.io/me`."""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """Rule by which a node fetches an image, in the API's words."""
    pull_secrets: tuple[str, ...] = ()
    """Secrets with the credentials of registries."""
    volumes: dict[Annotated[str, AfterValidator(_absolute)], ClaimMount] = Field(
        default_factory=dict
    )
    """Claims by the path at which orchestrator and stages see them. One of them holds the store,
    or with a store in a bucket its cache on disk; others hold prompts and models."""
    user: str | None = Field(None, pattern=r"^[1-9]\d*:\d+$")
    """User and group id of the stages, `1000:1000`; unset takes the orchestrator's, which must not
    be root then."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource by which a GPU is asked for."""
    shm_gib: float = Field(2, gt=0)
    """Shared memory of a stage in GiB; what it fills counts as its memory."""
    tmp_gib: float = Field(4, gt=0)
    """Largest size of a stage's /tmp in GiB, on the node's disk."""
    on_orchestrator_death: Literal["stop", "keep"] = "stop"
    """Stages of an orchestrator that is gone: they end (stop) or go on (keep). A resumed run takes
    over those that still run."""
    orchestrator_seconds: float = Field(120, ge=20)
    """Time without a sign of the orchestrator after which a stage ends, under `stop`."""
    pending_seconds: float = Field(600, gt=0)
    """Longest time that a pod may wait for a node, for its volumes, or for the namespace's quota.
    Waiting in a queue of Kueue does not count."""
    node_lost_seconds: int = Field(60, ge=0)
    """Time after which a pod on a node that does not answer is given up."""

    def volume_at(self, place: Path) -> tuple[Path, ClaimMount] | None:
        """The innermost volume that holds a path, with the path at which it is mounted."""
        holding = [Path(path) for path in self.volumes if place.is_relative_to(path)]
        if not holding:
            return None
        path = max(holding, key=lambda each: len(each.parts))
        return path, self.volumes[str(path)]

    def pod_of(self, stage: str) -> PodSettings:
        """Settings of a stage's pods: its own over those of all stages, mappings merged."""
        own = self.stages.get(stage)
        return PodSettings.model_construct(**fields_for_stage(PodSettings, self, own))
