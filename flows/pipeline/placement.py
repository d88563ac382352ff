"""Settings of runners, of the estimate and of trackers."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, PlainSerializer

from flows.pipeline.names import NAME_PATTERN
from stages.contract.params import Settings
from stages.store.opening import local_folder

ON_THIS_MACHINE = ("process", "docker")
"""Runners whose stages share the orchestrator's machine."""
RUNNERS = {
    "process": "flows.runners.local.process:ProcessPlace",
    "docker": "flows.runners.docker.place:DockerPlace",
    "kubernetes": "flows.runners.kubernetes.place:KubernetesPlace",
    "slurm": "flows.runners.slurm.place:SlurmPlace",
}
"""Places of this project's runners. Only their runs import them: some need an engine's client."""
RUNNER_GROUP = "geb.runners"
"""Group of entry points under which other packages bring runners."""


class DockerSettings(Settings):
    """Containers of the docker runner. Limits of memory, CPUs and GPUs are in `resources`."""

    images: dict[str, str] = {}
    """Image of a stage if it is not this project's own, by stage name; with a digest
    (`TAG@sha256:…`) or by its id no other image is used."""
    network: dict[str, str] = {}
    """Docker network of a stage that needs one (hub, judge), by stage name; others have none."""
    mounts: dict[str, Literal["ro", "rw"]] = {}
    """Further folders of this machine that stages see, at the same path: read-only or writable. A
    cache of the hub is one whose path `environment` has as HF_HOME."""
    environment: dict[str, dict[str, str]] = {}
    """Environment variables by stage name, for all to see: nothing secret."""
    secrets: dict[str, tuple[str, ...]] = {}
    """Names of the orchestrator's environment variables that a stage gets as well, by stage name;
    their values reach it through a pipe and are in no container's configuration."""
    user: str | None = Field(None, pattern=r"^\d+:\d+$")
    """User and group id of the stages, `1000:1000`; unset takes the orchestrator's, or the
    image's if the orchestrator is root."""
    shm_gib: float = Field(2, gt=0)
    """Shared memory of a stage in GiB."""
    tmp_gib: float = Field(4, gt=0)
    """Largest size of a stage's /tmp in GiB; it lives in memory and counts as such."""


S = TypeVar("S", bound=Settings)


def _for_stage(kind: type[S], everywhere: S, stages: Mapping[str, S], stage: str) -> S:
    """One stage's settings: its own fields over all stages', mappings merged by keys."""
    merged = {name: getattr(everywhere, name) for name in kind.model_fields}
    override = stages.get(stage)
    for name in override.model_fields_set if override else ():
        value = getattr(override, name)
        merged[name] = merged[name] | value if isinstance(value, dict) else value
    return kind.model_validate(merged)


def _as_given(stages: Mapping[str, Settings]) -> dict[str, Any]:
    """Settings of single stages as they are written: a default would replace all stages' value."""
    return {stage: settings.model_dump(exclude_unset=True) for stage, settings in stages.items()}


class ClaimMount(Settings):
    """A persistent volume claim, or a folder of it, as stages and orchestrator see it."""

    claim: str
    """Name of the claim, in the namespace of the pods."""
    sub_path: str = ""
    """Folder of the claim; empty for all of it."""
    writable: bool = False
    """Write access of stages to the whole claim. Their own folders of the store need none."""


PodField = Literal[
    "nodeSelector",
    "tolerations",
    "priorityClassName",
    "serviceAccountName",
    "schedulerName",
    "runtimeClassName",
    "imagePullSecrets",
    "schedulingGates",
    "dnsConfig",
    "dnsPolicy",
]
"""Fields of a pod that take nothing away from its limits."""


class PodSettings(Settings):
    """Settings of pods that may differ from stage to stage."""

    image: str | None = None
    """Image; unset takes this project's own, of `registry`."""
    environment: dict[str, str] = {}
    """Environment variables, for all to see: nothing secret."""
    secrets: dict[str, Annotated[str, Field(pattern=r"^[^/]+/[^/]+$")]] = {}
    """Environment variables whose values are in Kubernetes secrets: `{HF_TOKEN: SECRET/KEY}`."""
    spec: dict[PodField, Any] = {}
    """Further fields of the pod, in the API's words: `{nodeSelector: {pool: a100}, tolerations:
    [{key: gpu, operator: Exists}], priorityClassName: low, serviceAccountName: geb}`."""
    labels: dict[str, str] = {}
    """Further labels, such as `kueue.x-k8s.io/queue-name: research` for a local queue of Kueue."""
    extra_resources: dict[str, str | int] = {}
    """Further resources of each pod, in the API's words: `{rdma/hca: 1}`."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource by which a GPU is asked for; a slice of one is `nvidia.com/mig-1g.10gb`."""
    shm_gib: float = Field(2, gt=0)
    """Shared memory of a stage in GiB; what it fills counts as its memory."""
    tmp_gib: float = Field(4, gt=0)
    """Largest size of a stage's /tmp in GiB, on the node's disk."""


class KubernetesSettings(PodSettings):
    """Pods of the kubernetes runner. Limits of memory, CPUs, GPUs and time are in `resources`."""

    stages: Annotated[dict[str, PodSettings], PlainSerializer(_as_given)] = {}
    """Settings of single stages by their names, over the other settings of this section."""
    namespace: str | None = None
    """Namespace of the pods; unset takes the one of KUBECONFIG's current context, or within a pod
    its own."""
    registry: str = ""
    """Registry and folder of this project's images, such as `ghcr.io/me`."""
    volumes: dict[str, ClaimMount] = {}
    """Claims by the path at which orchestrator and stages see them. One of them holds the store;
    others hold prompts and models. A store in a bucket needs none: pods fetch and send by
    themselves, unless one holds the cache on disk."""
    user: str | None = Field(None, pattern=r"^[1-9]\d*:\d+$")
    """User and group id of the stages, `1000:1000`; unset takes the orchestrator's, which must not
    be root then."""
    fs_group: int | None = Field(None, gt=0)
    """Group to which volumes belong in the pods, for claims that only root could write to."""
    pending_seconds: float = Field(600, gt=0)
    """Longest time that a pod may wait for a node or for its volumes. Waiting for the namespace's
    quota or for scheduling gates, as in a queue of Kueue, does not count."""

    def volume_at(self, location: Path) -> tuple[Path, ClaimMount] | None:
        """The innermost volume that holds a path, with the path at which it is mounted."""
        for path in (location, *location.parents):
            if volume := self.volumes.get(str(path)):
                return path, volume
        return None

    def pod_of(self, stage: str) -> PodSettings:
        """Settings of a stage's pods: its own over the settings of all stages, mappings merged."""
        return _for_stage(PodSettings, self, self.stages, stage)


class SlurmJobSettings(Settings):
    """Options of a job, in addition to the `resources` of its stage."""

    partition: str | None = None
    """Partition; unset takes the cluster's default."""
    time_limit: str | None = Field(
        None, pattern=r"^(\d+-)?\d+(:\d+){0,2}$", coerce_numbers_to_str=True
    )
    """Wall-clock limit of a job as Slurm writes it (`90`, `4:00:00`, `2-0`); a stage that comes
    near it saves, ends, and goes on in another job."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch: `--account=lab`, `--qos=low`, `--gres=gpu:a100:2`."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun, such as `--container-image=…` of NVIDIA's plugin pyxis."""
    set_up: tuple[str, ...] = ()
    """Shell lines that each job runs first: `module load cuda`, `. ~/secrets`."""
    container: str | None = None
    """Command before the stage's that starts it in a container: `apptainer exec --nv --bind /shared
    /shared/geb-torch.sif`. Its `python` runs unless `execution.interpreters` names another one."""
    environment: dict[str, str] = {}
    """Environment variables of the stage, for all to see: nothing secret. The stage gets no
    variable of the orchestrator."""


class SlurmSettings(SlurmJobSettings):
    """Jobs of the slurm runner. CPUs, memory, GPUs and nodes are in `resources`."""

    stages: Annotated[dict[str, SlurmJobSettings], PlainSerializer(_as_given)] = {}
    """Settings of single stages by their names, over the other settings of this section."""

    def job(self, stage: str) -> SlurmJobSettings:
        """Settings of a stage's jobs: its own over the settings of all stages, mappings merged."""
        return _for_stage(SlurmJobSettings, self, self.stages, stage)


def runner_names() -> list[str]:
    """Names of the runners that are installed, this project's own first."""
    return [*RUNNERS, *sorted(entry_points(group=RUNNER_GROUP).names)]


def _installed(name: str) -> str:
    if name not in RUNNERS:
        packages = entry_points(group=RUNNER_GROUP, name=name)
        if not packages:
            raise ValueError(f"one of {', '.join(runner_names())} is wanted")
        if len(packages) > 1:
            raise ValueError(f"{len(packages)} packages bring {name!r}; uninstall all but one")
    return name


class Execution(Settings):
    """Start of the stages. Changes speed and place only."""

    runner: Annotated[str, AfterValidator(_installed)] = "process"
    """Place of the stages: subprocesses of this machine (process), containers of its Docker engine
    (docker), pods of a Kubernetes cluster, jobs of a Slurm cluster, or a place for which another
    package brings the runner."""
    runner_settings: dict[str, Any] = {}
    """Settings of a runner that another package brings; the runner checks them."""
    parallel: int = Field(1, ge=1)
    """Stages that may run at the same time."""
    retries: int = Field(1, ge=0)
    """Further attempts at a stage that failed, 5 seconds later; a wrong request or wrong data is
    never retried. A stage that has lost its machine uses up no retry; the pause doubles each time
    that it does so again without a new checkpoint, up to 64-fold."""
    grace_seconds: float = Field(30, gt=0)
    """Time for a stage to end after it was asked to, before it is killed."""
    on_orchestrator_death: Literal["stop", "keep"] = "stop"
    """Pods and Slurm jobs of an orchestrator that is gone: they end after two minutes without a
    sign of it (stop), or go on (keep). A resumed run takes over stages that still run."""
    fork_server: bool = True
    """Fork server of the process runner: stages without a GPU start as forks of a process that has
    loaded torch and transformers already, which saves seconds a stage."""
    sync_seconds: float = Field(600, gt=0)
    """Time between two copies of a running stage's state (checkpoints, chunks) to a store in a
    bucket, so that another host can go on from it."""
    interpreters: dict[str, str] = {}
    """Python interpreter of a stage if it is not the orchestrator's, by stage name."""
    docker: DockerSettings = DockerSettings()
    """Containers of the docker runner."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Pods of the kubernetes runner."""
    slurm: SlurmSettings = SlurmSettings()
    """Jobs of the slurm runner."""

    def sees(self, path: Path) -> bool:
        """True if stages see a path of this host."""
        return self.runner != "kubernetes" or self.kubernetes.volume_at(path) is not None

    def stages_fetch(self, store: str) -> bool:
        """True if stages reach a bucket's store by themselves: they do not see its cache."""
        return "://" in store and not self.sees(local_folder(store))


class Estimation(Settings):
    """Assumptions of `geb plan` (docs/training.md). They change no result and no key."""

    hardware: Literal["a100-40gb", "a100-80gb", "h100", "h200"] = "h100"
    """GPU of the stages that have `resources.….gpus`; stages without run on this machine's CPU."""
    prompts_per_iteration: int | None = Field(None, ge=1)
    """Prompts of an iteration if neither `prepare` nor a local file tells their number."""


Tracker = Literal["mlflow", "tensorboard", "trackio", "wandb"]
PACKAGES: dict[Tracker, str] = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}


class Tracking(Settings):
    """Trackers of the whole run (docs/operations.md). They change no result and no key."""

    report_to: tuple[Tracker, ...] = ()
    """Trackers that get the run's configuration, evaluations by iteration and training by step."""
    project: str = Field("geb", pattern=NAME_PATTERN, max_length=100)
    """Project of the run at a tracker; mlflow calls it experiment."""
