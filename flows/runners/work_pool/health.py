"""Health of a work pool: the reason why its flow runs are not taken, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import WorkerStatus, WorkQueueStatus
from prefect.client.schemas.responses import DeploymentResponse


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


def too_few_places(
    client: SyncPrefectClient, deployment: DeploymentResponse, nodes: int
) -> tuple[str, str] | None:
    """Reason why several flow runs of a deployment are never at work at once, with a remedy.

    Args:
        client: Of the Prefect server.
        deployment: Names work pool and queue.
        nodes: Number of flow runs.
    """
    for what, limit, command in _limits(client, deployment):
        if limit < nodes:
            return (
                f"{nodes} nodes are wanted, and the limit of {what} is {limit}",
                f"raise it: `{command} {nodes}`",
            )
    return None


def places(client: SyncPrefectClient, deployment: DeploymentResponse) -> str:
    """Workers online of a deployment's work pool, and its limits where it has any."""
    workers = client.read_workers_for_work_pool(str(deployment.work_pool_name))
    online = [each.name for each in workers if each.status == WorkerStatus.ONLINE]
    limits = [f"limit of {what}: {limit}" for what, limit, _ in _limits(client, deployment)]
    return "; ".join([f"workers online: {', '.join(online) or 'none'}", *limits])


def _limits(
    client: SyncPrefectClient, deployment: DeploymentResponse
) -> Iterator[tuple[str, int, str]]:
    """Limits of flow runs at once: whose each is, its number, and the command that sets it."""
    pool_name, queue_name = deployment.work_pool_name, deployment.work_queue_name
    if pool_name is None or queue_name is None:
        return
    pool = client.read_work_pool(pool_name)
    if pool.concurrency_limit is not None:
        command = f"prefect work-pool set-concurrency-limit {pool_name}"
        yield f"work pool {pool_name!r}", pool.concurrency_limit, command
    queue = client.read_work_queue_by_name(queue_name, work_pool_name=pool_name)
    if queue.concurrency_limit is not None:
        command = f"prefect work-queue set-concurrency-limit --pool {pool_name} {queue_name}"
        yield f"queue {queue_name!r}", queue.concurrency_limit, command
