"""Runs that a schedule starts, on a worker of this machine."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.iterate import iterate
from tests.flows.cluster import make_pool, worker
from tests.flows.probes import wait_until
from tests.flows.standing import SMALL_OVERRIDES

POOL = "pool-schedules"
QUEUE = "runs"
# A schedule that the server or the worker came too late for is due again so soon.
INTERVAL = timedelta(seconds=20)
# Steps that the small run has not computed: it promoted under its own name.
CHANGED = {"iteration-1/evaluate", "iteration-1/promote"}


def scheduled(store: Path, execution: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Configuration of a small run with an evaluation of its own: changes to `quickstart`."""
    return (
        SMALL_OVERRIDES
        | {"name": "scheduled", "store": str(store)}
        | {"evaluate": {"sample_prompts": 3}}
        | {"execution": SMALL_OVERRIDES["execution"] | execution}
        | changes
    )


def run_by_schedule(server: str, folder: Path, config: dict[str, Any]) -> FlowRun:
    """Deploys `iterate` with a schedule and returns its first run, which has ended.

    Args:
        server: Address of a Prefect server's API.
        folder: For files of the worker.
        config: Changes to the preset `quickstart`.
    """
    with SyncPrefectClient(server) as client:
        make_pool(client, POOL, QUEUE)
        made = iterate.to_deployment(
            # Two tests of one server must not take each other's runs.
            name=f"{config['name']}-{folder.name}",
            parameters={"preset": "quickstart", "config": config},
            interval=INTERVAL,
            work_pool_name=POOL,
            work_queue_name=QUEUE,
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        assert isinstance(made, RunnerDeployment)
        with temporary_settings({PREFECT_API_URL: server}):
            deployment = made.apply()
        due = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))

        def first() -> FlowRun | None:
            order = FlowRunSort.EXPECTED_START_TIME_ASC
            found = client.read_flow_runs(flow_run_filter=due, sort=order, limit=1)
            return found[0] if found else None

        def has_begun() -> bool:
            run = first()
            return run is not None and run.state_type is not StateType.SCHEDULED

        with worker(client, folder, POOL, QUEUE, f"worker-{config['name']}", limit=1):
            wait_until(has_begun)
            # The runs that would follow go with it.
            [schedule] = client.read_deployment(deployment).schedules
            client.delete_deployment_schedule(deployment, schedule.id)
            wait_until(lambda: (run := first()) and run.state and run.state.is_final())
        run = first()
    assert run is not None
    assert run.auto_scheduled
    return run
