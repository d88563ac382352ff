"""Settings of the slurm runner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flows.pipeline.by_stage import fields_for_stage
from stages.contract.params import Settings


class SlurmJobSettings(Settings):
    """Options of a job, beside the `resources` of its stage."""

    partition: str | None = None
    """Partition; unset takes the cluster's default."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service: priority and limits."""
    constraint: str | None = None
    """Features that the nodes must have, such as `a100&nvlink`."""
    gpu_type: str | None = None
    """Type in the request for GPUs (`--gres=gpu:TYPE:N`); unset takes any."""
    time_limit: str | None = Field(None, pattern=r"^(\d+-)?\d+(:\d+){0,2}$")
    """Wall-clock limit of a job as Slurm writes it (`90`, `4:00:00`, `2-0`); a stage that comes
    near it saves, ends, and goes on in another job."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch, such as `--reservation=geb`."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun, such as `--container-image=…` where pyxis is."""
    set_up: tuple[str, ...] = ()
    """Shell lines that each job runs first: `module load cuda`, `. ~/secrets`."""
    container: str | None = None
    """Command before the stage's, such as `apptainer exec --nv image.sif`; then set
    `execution.interpreters` to the Python of the image."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the stage, for all to see: nothing secret. Of the orchestrator's
    environment it gets none."""


class SlurmSettings(SlurmJobSettings):
    """Jobs of the slurm runner. CPUs, memory, GPUs and nodes are in `resources`."""

    stages: dict[str, SlurmJobSettings] = Field(default_factory=dict)
    """Settings of single stages by their names, over the settings beside this one."""
    poll_seconds: float = Field(10, gt=0)
    """Time between two calls of squeue, one for all jobs."""
    on_orchestrator_death: Literal["stop", "keep"] = "stop"
    """Jobs of a killed orchestrator: they end (stop) or go on (keep). A resumed run takes over
    those that still run."""
    orchestrator_seconds: float = Field(120, ge=20)
    """Time without a sign of the orchestrator after which a job ends, under `stop`."""

    def job(self, stage: str) -> SlurmJobSettings:
        """Settings of a stage's jobs: its own over those of all stages, mappings merged."""
        own = self.stages.get(stage)
        return SlurmJobSettings.model_construct(**fields_for_stage(SlurmJobSettings, self, own))
