"""Wait for the flow run of one attempt at a stage; while no worker takes it, the pool says why."""

from __future__ import annotations

import queue
import threading
import time

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus, WorkQueueStatus
from prefect.client.schemas.responses import DeploymentResponse

from flows.pipeline.placement import WorkPoolSettings
from flows.runners.base import OnEvent
from flows.runners.work_pool.flow_runs import FlowRunPoller, cancel, is_over
from stages.contract.errors import UserError
from stages.contract.events import Log, Progress
from stages.contract.request import Request

# Between two warnings that no worker takes a stage.
_WARN_SECONDS = 60.0
# A worker takes what it is sent within this time, or somebody should know.
_PATIENCE_SECONDS = 20.0
_CHECK_SECONDS = 0.5
_WAITING = (StateType.SCHEDULED, StateType.PENDING)


class FlowRunWait:
    """Waits for the end of a flow run.

    Args:
        client: Client of the Prefect server.
        deployment: Names its work pool and queue.
        request: What it computes.
        settings: How long a worker is waited for.
        on_event: Gets progress, and what it waits for.
    """

    def __init__(
        self,
        client: SyncPrefectClient,
        deployment: DeploymentResponse,
        request: Request,
        settings: WorkPoolSettings,
        on_event: OnEvent,
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._request = request
        self._limit = settings.worker_wait_seconds
        self._on_event = on_event
        self._since = time.monotonic()
        self._next_check = self._since + min(_PATIENCE_SECONDS, self._limit)

    def wait(
        self,
        run: FlowRun,
        poller: FlowRunPoller,
        stopping: threading.Event,
        gave_up: threading.Event,
    ) -> FlowRun:
        """Returns the flow run as it ended, or as it was last seen.

        Args:
            run: The flow run.
            poller: Sees the flow run.
            stopping: Set when it is being cancelled from elsewhere.
            gave_up: Set when it is not waited for any more.

        Raises:
            UserError: No worker polls its queue.
        """
        shown: Progress | None = None
        with poller.watched(run.id) as updates:
            while not gave_up.is_set() and not is_over(run):
                try:
                    update = updates.get(timeout=_CHECK_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(update, Progress):
                    if update != shown:
                        shown = update
                        self._on_event(update)
                    continue
                run = update
                if run.state_type in _WAITING and not stopping.is_set():
                    self._check(run)
                else:
                    self._since = time.monotonic()
        return run

    def _check(self, run: FlowRun) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + min(_WARN_SECONDS, self._limit)
        why = why_nobody_serves(self._client, self._deployment)
        if why is None:
            self._since = now
            return
        self._on_event(Log(level="warning", message=f"still waiting: {why[0]}. {why[1]}"))
        if now - self._since >= self._limit:
            cancel(self._client, run.id)
            raise UserError(f"{self._request.place}: {why[0]}", why[1])


def why_nobody_serves(
    client: SyncPrefectClient, deployment: DeploymentResponse
) -> tuple[str, str] | None:
    """Reason why no worker takes flow runs of a deployment, with a remedy; None if one does.

    Args:
        client: Of the Prefect server.
        deployment: Names work pool and queue.
    """
    pool_name, queue_name = deployment.work_pool_name, deployment.work_queue_name
    if pool_name is None or queue_name is None:
        return (
            f"deployment {deployment.name!r} names no work pool",
            "deploy it with one (`prefect deploy --all`)",
        )
    pool = client.read_work_pool(pool_name)
    if pool.is_push_pool or pool.is_managed_pool:
        return None
    if pool.is_paused:
        return (
            f"work pool {pool_name!r} is paused",
            f"let it go on: `prefect work-pool resume {pool_name}`",
        )
    queue = client.read_work_queue_by_name(queue_name, work_pool_name=pool_name)
    if queue.status == WorkQueueStatus.PAUSED:
        return (
            f"queue {queue_name!r} of work pool {pool_name!r} is paused",
            f"let it go on: `prefect work-queue resume {queue_name} --pool {pool_name}`",
        )
    workers = client.read_workers_for_work_pool(pool_name)
    online = any(each.status == WorkerStatus.ONLINE for each in workers)
    if not online or queue.status == WorkQueueStatus.NOT_READY:
        return (
            f"no worker polls queue {queue_name!r} of work pool {pool_name!r}",
            f"start one: `geb worker {pool_name} --queue {queue_name}`",
        )
    return None
