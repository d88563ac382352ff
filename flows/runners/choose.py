"""The table of runners, and what the command ``geb doctor`` asks of the places behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from flows.pipeline.config import RunConfig
from flows.pipeline.placement import Execution
from flows.runners.base import Runner
from flows.runners.health import Finding
from flows.runners.local.bucket_sync import BucketSyncRunner
from flows.runners.local.gpu_limit import GpuLimitRunner
from flows.runners.local.process import ProcessRunner
from flows.runners.slurm.runner import SlurmRunner
from flows.runners.slurm.submission import check_jobs
from stages.contract.errors import UserError
from stages.contract.local_store import LocalStore
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


def runner_findings(runner: str, config: RunConfig) -> Iterator[Finding]:
    """Looks at the place of a runner, as a configuration has it.

    Raises:
        UserError: There is nothing to look at beyond this machine.
    """
    if runner == "kubernetes":
        from flows.runners.kubernetes.health import findings
    elif runner == "slurm":
        from flows.runners.slurm.health import findings
    else:
        raise UserError(
            f"--runner {runner}: no such place beyond this machine", "one of: kubernetes, slurm"
        )
    return findings(config)


def reap_for(runner: str | None, config: RunConfig) -> list[str]:
    """Removes what dead orchestrators left with a runner, also what was to outlive them.

    Args:
        runner: Its name; None for containers of this machine, if it has a Docker engine.
        config: Holds its settings and, where that tells what is meant, the store.

    Returns:
        A line for each thing that was removed.

    Raises:
        UserError: This runner leaves nothing, or the place that is named does not answer.
    """
    if runner == "kubernetes":
        from flows.runners.kubernetes.reaper import reap_cluster

        return reap_cluster(config.execution.kubernetes, keep_running=False)
    if runner == "slurm":
        from flows.runners.slurm.folder import sweep

        return sweep(LocalStore.open(config.store), cancel=True)
    if runner in (None, "docker"):
        from flows.runners.docker.container import reap as reap_containers

        try:
            return reap_containers(keep_running=False)
        except UserError as error:
            if runner is None:
                return [f"containers were not looked for: {error}"]
            raise
    raise UserError(f"--reap --runner {runner}: stages of this runner leave nothing")
