"""The table of runners."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flows.pipeline.placement import Execution
from flows.runners.base import Runner
from flows.runners.local.bucket_sync import BucketSyncRunner
from flows.runners.local.gpu_limit import GpuLimitRunner
from flows.runners.local.process import ProcessRunner
from flows.runners.slurm.preflight import check_jobs
from flows.runners.slurm.runner import SlurmRunner
from stages.contract.params import Settings


def _process(execution: Execution) -> Runner:
    runner = ProcessRunner(
        execution.interpreters, execution.grace_seconds, fork_server=execution.fork_server
    )
    return BucketSyncRunner(GpuLimitRunner(runner, execution.gpu_limit), execution.sync_seconds)


def _docker(execution: Execution) -> Runner:
    # Here, so that a run without containers does not load the engine's client.
    from flows.runners.docker.runner import DockerRunner

    runner = DockerRunner(execution.docker, execution.grace_seconds)
    return BucketSyncRunner(GpuLimitRunner(runner, execution.gpu_limit), execution.sync_seconds)


def _work_pool(execution: Execution) -> Runner:
    # Here: the command line answers without Prefect.
    from flows.runners.work_pool.runner import WorkPoolRunner

    return WorkPoolRunner(execution)


def _kubernetes(execution: Execution) -> Runner:
    # Here: only these runs need the cluster's client.
    from flows.runners.kubernetes.runner import KubernetesRunner

    runner = KubernetesRunner(execution.kubernetes, execution.grace_seconds)
    return BucketSyncRunner(runner, execution.sync_seconds)


def _slurm(execution: Execution) -> Runner:
    return SlurmRunner(execution.slurm, execution.interpreters, execution.grace_seconds)


RUNNERS: Mapping[str, Callable[[Execution], Runner]] = {
    "process": _process,
    "docker": _docker,
    "work_pool": _work_pool,
    "kubernetes": _kubernetes,
    "slurm": _slurm,
}


def check_place(execution: Execution, resources: Settings) -> None:
    """Checks, as far as that is known before a run, whether its stages can be started.

    Args:
        execution: How they are started.
        resources: `Resources` of each stage, by its name.

    Raises:
        UserError: A setting is one that the place will never serve.
    """
    if execution.runner == "slurm":
        check_jobs(execution, resources)


def make_runner(execution: Execution) -> Runner:
    """The runner that a configuration asks for."""
    return RUNNERS[execution.runner](execution)


def make_node_runner(execution: Execution, node: int) -> Runner:
    """The runner of another node than the first, on its own host.

    Args:
        execution: How stages are started.
        node: Its number, from 1.
    """
    runner = ProcessRunner(execution.interpreters, execution.grace_seconds, node=node)
    return GpuLimitRunner(runner, execution.gpu_limit)
