"""Meaning of what sbatch and squeue say: a person's mistake, a full queue, or a busy controller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from flows.pipeline.slurm import SlurmJobSettings
from stages.contract.errors import UserError
from stages.contract.request import Request

Meaning = Literal["mistake", "full", "busy"]

# Slurm's limits on jobs that are submitted, not on what one asks for: there is room later.
_FULL = re.compile(r"MaxSubmit|job submit limit|temporarily unable to accept|MaxJobCount", re.I)
_BUSY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|timed out)|Zero Bytes"
    r"|standby mode|Resource temporarily unavailable|Transport endpoint|not available now"
    r"|Unexpected message received|in the process of being|Communication connection failure",
    re.I,
)
# What sbatch says about a request, and the setting that it means.
_SETTINGS: Mapping[str, tuple[str, str]] = {
    r"invalid partition|partition name": (
        "execution.slurm.partition is {job.partition!r}",
        "`sinfo -s` lists the partitions",
    ),
    r"account": (
        "execution.slurm.account is {job.account!r}",
        "`sacctmgr show associations user=$USER` lists your accounts and their partitions",
    ),
    r"qos specification|invalid qos": (
        "execution.slurm.qos is {job.qos!r}",
        "`sacctmgr show qos` lists them, `sacctmgr show associations user=$USER` which are yours",
    ),
    r"feature": (
        "execution.slurm.constraint is {job.constraint!r}",
        "`sinfo -o '%N %f'` lists the nodes' features",
    ),
    r"gres": (
        "resources.{stage}.gpus is {resources.gpus} and execution.slurm.gpu_type {job.gpu_type!r}",
        "`sinfo -o '%P %N %G'` lists the nodes' GPUs",
    ),
    r"time limit": (
        "execution.slurm.time_limit is {job.time_limit!r}",
        "`sinfo -o '%P %l'` lists the partitions' limits",
    ),
    r"node configuration|node count|memory|processors|cpu": (
        "resources.{stage} asks for {resources.nodes} nodes with {resources.gpus} GPUs, {cpus} CPUs"
        " and {memory} each",
        "`sinfo -o '%P %D %c %m %G'` lists nodes, CPUs, MiB and GPUs of the partitions; ask for "
        "less, or name another partition in execution.slurm",
    ),
}
# Reasons for which a job is pending and that no other job's end removes.
_HOPELESS = re.compile(
    r"PartitionNodeLimit|PartitionTimeLimit|BadConstraints|InvalidAccount|InvalidQOS|PerJob"
    r"|MaxWallDuration|AccountNotAllowed|QOSNotAllowed|JobHoldMaxRequeue|launch failed"
    r"|JobHeldAdmin|AssocGrp\w*(Minutes|RunMinutes)Limit|QOSUsageThreshold|QOSMin\w+|DependencyNever"
)


def meaning_of(said: str) -> Meaning:
    """Meaning of a refusal of sbatch, by what it wrote to stderr."""
    if _BUSY.search(said):
        return "busy"
    return "full" if _FULL.search(said) else "mistake"


def concerns_nodes(said: str) -> bool:
    """True where sbatch finds no nodes for a request, which those that are up decide."""
    return re.search(r"node configuration|node count", said, re.I) is not None


def mistake(said: str, request: Request, job: SlurmJobSettings) -> UserError:
    """The error for a request that Slurm does not take.

    Args:
        said: What Slurm said: sbatch's stderr, or why a job stays pending.
        request: The request.
        job: Settings of its job.
    """
    resources = request.resources
    values = {
        "job": job,
        "stage": request.stage,
        "resources": resources,
        "cpus": resources.cpus or resources.processes,
        "memory": f"{resources.memory_gib:g} GiB" if resources.memory_gib else "any memory",
    }
    where, remedy = next(
        (known for pattern, known in _SETTINGS.items() if re.search(pattern, said, re.I)),
        (f"settings in execution.slurm and resources.{request.stage}", "correct them"),
    )
    last = said.strip().splitlines()[-1] if said.strip() else "no reason given"
    last = re.sub(r"^(sbatch|allocation failure): *(error: *)?", "", last)
    return UserError(
        f"{request.place}: Slurm refuses the job: {last} ({where.format_map(values)})",
        remedy,
    )


def check_pending(reason: str, request: Request, job: SlurmJobSettings) -> None:
    """Refuses a job that Slurm took and will never start.

    Raises:
        UserError: Its reason does not go away by waiting.
    """
    if not _HOPELESS.search(reason):
        return
    hint = {"PartitionTimeLimit": "time limit", "PartitionNodeLimit": "node count"}.get(reason, "")
    raise mistake(f"{hint}\nit would be pending for ever, reason {reason}", request, job)
