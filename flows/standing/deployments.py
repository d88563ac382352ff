"""The deployments of `geb up`: one for each flow, with this machine's store filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from experiments.bandit import bandit
from experiments.paper.flow import paper
from flows import HEARTBEAT_SECONDS, HEARTBEAT_VARIABLE
from flows.compare import compare
from flows.evaluate import evaluate
from flows.iterate import iterate
from flows.pipeline.placement import Execution
from flows.pipeline.presets import STORE_VARIABLE
from flows.runners.local.gpu_locks import gpus_of_this_host
from flows.stage import stage
from flows.standing.automations import install_automations
from flows.sweep import sweep

POOL = "geb"
# One worker serves all queues: runs that wait for their stages must not keep the stages waiting.
RUNS, CPU, GPU = "runs", "cpu", "gpu"
_TAGS = ("geb",)


def register(store: str, folder: Path, limit: int) -> list[str]:
    """Creates or updates work pool, queues, deployments and automations.

    Args:
        store: The store that the forms start with.
        folder: Working directory of flow runs: relative paths in forms start there.
        limit: Runs at the same time; their stages are not counted.

    Returns:
        Names of the deployments.
    """
    with get_client(sync_client=True) as client:
        _create_pool(client)
        for queue, most in ((RUNS, limit), (CPU, None), (GPU, None)):
            _create_queue(client, queue, most)
        _create_gpu_limit(client)
    install_automations()
    start = {"config": {"store": store}}
    environment = {STORE_VARIABLE: store, HEARTBEAT_VARIABLE: str(HEARTBEAT_SECONDS)}
    job = {"working_dir": str(folder), "env": environment}
    made = [
        _deployment(flow, flow.name, RUNS, start, job)
        for flow in (iterate, evaluate, sweep, paper, bandit)
    ]
    # Its store is that of the environment.
    made.append(_deployment(compare, compare.name, RUNS, {}, job))
    made += [_deployment(stage, queue, queue, {}, job) for queue in (CPU, GPU)]
    for each in made:
        each.apply()
    return [f"{each.flow_name}/{each.name}" for each in made]


def _deployment(
    flow: Flow[..., Any], name: str, queue: str, parameters: dict[str, Any], job: dict[str, Any]
) -> RunnerDeployment:
    made = flow.to_deployment(
        name=name,
        description=flow.description,
        tags=list(_TAGS),
        parameters=parameters,
        work_pool_name=POOL,
        work_queue_name=queue,
        job_variables=job,
        # The package is installed where the worker runs: there is no source to pull.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(made, RunnerDeployment)
    return made


def _create_pool(client: SyncPrefectClient) -> None:
    try:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    except ObjectAlreadyExists:
        return


def _create_queue(client: SyncPrefectClient, name: str, limit: int | None) -> None:
    try:
        queue = client.create_work_queue(name, work_pool_name=POOL, concurrency_limit=limit)
    except ObjectAlreadyExists:
        queue = client.read_work_queue_by_name(name, work_pool_name=POOL)
    client.update_work_queue(queue.id, concurrency_limit=limit)


def _create_gpu_limit(client: SyncPrefectClient) -> None:
    """A slot for each GPU of this machine, unless a person has set the limit."""
    gpus = len(gpus_of_this_host())
    name = Execution().gpu_limit
    try:
        client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        if gpus:
            client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=name, limit=gpus)
            )
