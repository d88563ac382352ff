"""A small cluster on this machine: work pools, deployments and process workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, WorkerStatus
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.stage import stage
from tests.flows.probe_flow import ProbeConfig, probes
from tests.flows.probes import wait_until


def make_pool(client: SyncPrefectClient, pool: str, queue: str) -> None:
    """A process work pool with one queue."""
    try:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        client.create_work_queue(name=queue, work_pool_name=pool)
    except ObjectAlreadyExists:
        return


def deploy_stage(client: SyncPrefectClient, name: str, pool: str, queue: str) -> None:
    """Deploys the flow of a stage to one queue; the settings' names are `cpu` and `gpu`."""
    made = stage.to_deployment(
        name=name,
        work_pool_name=pool,
        work_queue_name=queue,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(made, RunnerDeployment)
    with temporary_settings({PREFECT_API_URL: str(client.api_url)}):
        made.apply()


@contextmanager
def worker(
    client: SyncPrefectClient, folder: Path, pool: str, queue: str, name: str, limit: int = 100
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker with a home and a working directory of its own; gone at the end of the block."""
    home = folder / name
    home.mkdir(exist_ok=True)
    environment = os.environ | {
        "HOME": str(home),
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "GEB_WORKER": name,
    }
    with (home / "worker.log").open("a") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "flows.commands.cli", "worker", pool),
                *("--queue", queue, "--name", name, "--limit", str(limit)),
            ],
            cwd=home,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: is_online(client, pool, name))
        yield process
    finally:
        # Its supervisor ends all below it.
        process.kill()
        process.wait()


def is_online(client: SyncPrefectClient, pool: str, name: str) -> bool:
    """True while the server has heard of a worker lately."""
    found = client.read_workers_for_work_pool(pool)
    return any(each.name == name and each.status == WorkerStatus.ONLINE for each in found)


def deploy_probes(client: SyncPrefectClient, pool: str, queue: str) -> None:
    """Deploys the flow of probes."""
    made = probes.to_deployment(
        name="probes",
        work_pool_name=pool,
        work_queue_name=queue,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(made, RunnerDeployment)
    with temporary_settings({PREFECT_API_URL: str(client.api_url)}):
        made.apply()


def start_probes(client: SyncPrefectClient, config: ProbeConfig) -> FlowRun:
    """Starts the deployed flow of probes, as the UI would."""
    deployment = client.read_deployment_by_name("probes/probes")
    return client.create_flow_run_from_deployment(
        deployment.id, parameters={"config": config.model_dump(mode="json")}
    )
