"""A run that a worker of a work pool has started, and its end."""

import os
import subprocess
import sys

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import WorkerStatus
from prefect.deployments.runner import EntrypointType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from flows.pipeline.placement import Execution
from tests.flows.probe_flow import ProbeConfig, probes
from tests.flows.probes import gone, hanging_pids, wait_until
from tests.probe_stage import ProbeParams

pytestmark = pytest.mark.slow

POOL, QUEUE = "pool", "runs"


def is_online(client):
    """True while the server has heard of the worker lately."""
    workers = client.read_workers_for_work_pool(POOL)
    return any(worker.status == WorkerStatus.ONLINE for worker in workers)


def test_cancelling_a_run_on_a_worker_ends_its_stages(prefect_server, tmp_path, probe_stage):
    client = SyncPrefectClient(prefect_server)
    client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    client.create_work_queue(name=QUEUE, work_pool_name=POOL)
    deployed = probes.to_deployment(
        name="probes",
        work_pool_name=POOL,
        work_queue_name=QUEUE,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        deployed.apply()
    config = ProbeConfig(
        name=tmp_path.name,
        store=str(tmp_path / "store"),
        probes=(ProbeParams(behaviour="leave_child"),),
        execution=Execution(retries=0, grace_seconds=5),
    )
    command = [sys.executable, "-m", "stages.harness.supervisor", "--grace", "20", "--"]
    command += [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL]
    command += ["--work-queue", QUEUE]
    environment = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_WORKER_QUERY_SECONDS": "1"}
    worker = subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | environment, stdin=subprocess.PIPE
    )
    try:
        wait_until(lambda: is_online(client))
        deployment = client.read_deployment_by_name("probes/probes")
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"config": config.model_dump(mode="json")}
        )
        pids = hanging_pids(tmp_path / "store")
        client.set_flow_run_state(run.id, Cancelling())
        assert all(gone(pid) for pid in pids)
        wait_until(lambda: client.read_flow_run(run.id).state_name == "Cancelled")
    finally:
        # Its supervisor ends all below it.
        worker.communicate()
