"""Settings of execution: how and where stages are started. They never change a result."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, create_model

from flows.pipeline.kubernetes import KubernetesSettings
from flows.pipeline.slurm import SlurmSettings
from stages.contract.params import Settings, StageParams
from stages.contract.request import Resources

ON_THIS_MACHINE = ("process", "docker")
"""Runners whose stages share the orchestrator's machine."""
EVAL = "eval"
"""Image, and environment (`make setup-eval`), with the code of lm-eval and AlpacaEval."""


def stage_sections(config: type[Settings]) -> dict[str, type[StageParams]]:
    """Sections of a configuration that are a stage's parameters, by field, in their order."""
    return {
        name: field.annotation
        for name, field in config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, StageParams)
    }


def resources_of(config: type[Settings]) -> Any:
    """A base class with a field of type `Resources` for each stage of a configuration."""
    fields: dict[str, Any] = {
        name: (Resources, Field(Resources(), description=f"Resources of each call of `{name}`."))
        for name in stage_sections(config)
    }
    return create_model("StageResources", __base__=Settings, **fields)


class DockerSettings(Settings):
    """Containers of the docker runner. Limits of memory, CPUs and GPUs are in `resources`."""

    images: dict[str, str] = Field(default_factory=dict)
    """Image of a stage where it is not this project's own, by stage name; with a digest
    (`TAG@sha256:…`) no other image of that name is used."""
    network: dict[str, str] = Field(default_factory=dict)
    """Docker network of a stage that needs one (hub, judge), by stage name; others have none."""
    mounts: dict[str, Literal["ro", "rw"]] = Field(default_factory=dict)
    """Further folders of this machine that stages see, at the same path: read-only or writable."""
    model_cache: str | None = None
    """Folder for what comes from the Hugging Face hub (HF_HOME); unset, it lasts for one stage."""
    environment: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Environment variables by stage name, for all to see: nothing secret."""
    secrets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Names of the orchestrator's environment variables that a stage gets as well, by stage name;
    their values reach it through a pipe and are in no container's configuration."""
    user: str | None = Field(None, pattern=r"^\d+:\d+$")
    """User and group id of the stages, `1000:1000`; unset, those of the orchestrator, or the
    image's where that is root."""
    shm_gib: float = Field(2, gt=0)
    """Shared memory of a stage in GiB."""
    tmp_gib: float = Field(4, gt=0)
    """Largest size of a stage's /tmp in GiB; it lives in memory and counts as such."""
    pids: int = Field(4096, ge=1)
    """Most processes and threads of a stage."""
    ulimits: dict[str, int] = Field(default_factory=dict)
    """Resource limits, such as `memlock: -1`; hard and soft alike."""
    on_orchestrator_death: Literal["stop", "keep"] = "stop"
    """Fate of a stage whose orchestrator is killed: it ends, or goes on and is taken over by the
    one that resumes the run."""


class WorkPoolSettings(Settings):
    """Stages on the workers of Prefect work pools. Pool and queue are those of the deployment."""

    cpu_deployment: str = "stage/cpu"
    """Deployment of the flow `stage` for stages that ask for no GPU, `flow/deployment`."""
    gpu_deployment: str = "stage/gpu"
    """Deployment of the flow `stage` for stages that ask for GPUs."""
    job_variables: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Job variables by stage name, over the deployment's: image, node selector, limits."""
    launcher: Literal["process", "docker"] = "process"
    """Runner by which the host of a worker starts a stage."""
    poll_seconds: float = Field(2, gt=0)
    """Time between two looks at the stages on workers."""
    worker_wait_seconds: float = Field(900, gt=0)
    """Time that a stage may wait for a worker while none polls its queue, before the run fails."""


def interpreter_of(interpreters: Mapping[str, str], stage: str, image: str) -> str:
    """Python of a step: the orchestrator's unless another one is named.

    Args:
        interpreters: `execution.interpreters`.
        stage: The step's stage.
        image: Image that it needs.
    """
    by_stage = interpreters.get(stage, sys.executable)
    return interpreters.get(EVAL, by_stage) if image == EVAL else by_stage


class Execution(Settings):
    """Start of the stages. Changes speed and place only."""

    runner: Literal["process", "docker", "work_pool", "kubernetes", "slurm"] = "process"
    """Place of the stages: subprocesses of this machine, containers of its Docker engine, workers
    of Prefect work pools, pods of a Kubernetes cluster, or jobs of a Slurm cluster."""
    parallel: int = Field(1, ge=1)
    """Stages that may run at the same time."""
    retries: int = Field(1, ge=0)
    """Further attempts at a stage that failed; a wrong request or wrong data is never retried."""
    retry_delay_seconds: float = Field(5, ge=0)
    """Pause before another attempt."""
    grace_seconds: float = Field(30, gt=0)
    """Time for a stage to end after it was asked to, before it is killed."""
    fork_server: bool = True
    """Fork server of the process runner: stages without a GPU start as forks of a process that has
    loaded torch and transformers already, which saves seconds a stage."""
    share_engines: bool = True
    """One engine for the samplings of a policy that are due at the same time, such as its
    evaluation and the next iteration's: the program of the first goes on with the others. With the
    runners `process` and `docker` and a store in a folder. Without it each starts its own, so that
    two can sample at once where there are devices for both."""
    sync_seconds: float = Field(600, gt=0)
    """With a store in a bucket: how often a running stage's state (checkpoints, chunks) goes there,
    so that another host can go on from it."""
    interpreters: dict[str, str] = Field(default_factory=dict)
    """Python interpreter of a stage where it is not the orchestrator's, by stage name; under `eval`
    that of steps which need the code of lm-eval or AlpacaEval, whatever their stage; under
    `trackers` that of the packages of `tracking.report_to`."""
    gpu_limit: str = "gpu"
    """Global concurrency limit of the Prefect server, a slot for each GPU that stages may use at
    once over all runs and hosts: `prefect gcl create gpu --limit 8`. Without one, none is set."""
    docker: DockerSettings = DockerSettings()
    """Containers of the docker runner."""
    work_pool: WorkPoolSettings = WorkPoolSettings()
    """Deployments and workers of the work-pool runner."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Pods of the kubernetes runner."""
    slurm: SlurmSettings = SlurmSettings()
    """Jobs of the slurm runner."""

    def uses_own_image(self, stage: str) -> bool:
        """True where a stage is in an image of this project: a container, and none was named."""
        if self.runner == "docker":
            return stage not in self.docker.images
        return self.runner == "kubernetes" and self.kubernetes.pod_of(stage).image is None
