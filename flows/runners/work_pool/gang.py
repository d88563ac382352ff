"""Wait for the flow runs of one attempt at a stage, one for each of its nodes.

The first node's flow run computes the artifact. Its end, and the failure of another one, is the end
of all: those that no worker has taken are cancelled at once, those at work when they have not
noticed by themselves. While none is taken, the state of work pool and queue says why.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType, WorkerStatus, WorkQueueStatus
from prefect.client.schemas.responses import DeploymentResponse

from flows.pipeline.placement import WorkPoolSettings
from flows.runners.base import OnEvent
from flows.runners.work_pool.flow_runs import FlowRunPoller, cancel, is_over
from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Log, Progress
from stages.contract.request import Request


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


CANCEL_SECONDS = 60.0
"""Beside the grace period: a worker sees a cancellation when it polls, and reports the end."""
# Between two warnings that no worker takes a stage.
_WARN_SECONDS = 60.0
# A worker takes what it is sent within this time, or somebody should know.
_PATIENCE_SECONDS = 20.0
_CHECK_SECONDS = 0.5
_WAITING = (StateType.SCHEDULED, StateType.PENDING)


class _Member:
    """One flow run of the gang.

    Attributes:
        run: As the server last showed it.
        since: When a worker last could have taken it, of `time.monotonic`.
        next_check: When to ask why none does.
    """

    def __init__(self, run: FlowRun, patience: float) -> None:
        self.run = run
        self.since = time.monotonic()
        self.next_check = self.since + patience
        self.told = False
        self.is_cancelled = False


class Gang:
    """The flow runs of one attempt.

    Args:
        client: Of the Prefect server.
        runs: The flow runs, the first node's first.
        deployment: Names their work pool and queue.
        request: What they compute.
        settings: How long a worker is waited for.
        grace_seconds: Time between SIGTERM and SIGKILL.
        on_event: Gets progress, and what they wait for.
    """

    def __init__(
        self,
        client: SyncPrefectClient,
        runs: Sequence[FlowRun],
        deployment: DeploymentResponse,
        request: Request,
        settings: WorkPoolSettings,
        grace_seconds: float,
        on_event: OnEvent,
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._request = request
        self._settings = settings
        self._grace_seconds = grace_seconds
        self._on_event = on_event
        patience = min(_PATIENCE_SECONDS, settings.worker_wait_seconds)
        self._members = {run.id: _Member(run, patience) for run in runs}
        self._shown: Progress | None = None
        self._ended: list[FlowRun] = []
        self._first_end: float | None = None
        self._held_since: float | None = None
        self._failure: StageFailedError | None = None

    def wait(
        self, poller: FlowRunPoller, stopping: threading.Event, gave_up: threading.Event
    ) -> list[FlowRun]:
        """Returns those that ended by themselves, in the order of their ends.

        After them stand flow runs that have not ended in time, since nobody hears of their workers.

        Args:
            poller: Sees the flow runs.
            stopping: Set when they are being cancelled from elsewhere.
            gave_up: Set when they are not waited for any more.

        Raises:
            UserError: No worker polls their queue.
            StageFailedError: A node was taken by no worker while the others waited for it.
        """
        with poller.watched(*self._members) as updates:
            while not gave_up.is_set() and not self._is_over():
                try:
                    update = updates.get(timeout=_CHECK_SECONDS)
                except queue.Empty:
                    pass
                else:
                    self._take(update, stopping)
                if self._first_end is not None:
                    self._end_others(time.monotonic() - self._first_end)
        if self._failure is not None and not stopping.is_set():
            raise self._failure
        return [*self._ended, *(each.run for each in self._open())]

    def _open(self) -> list[_Member]:
        return [each for each in self._members.values() if not is_over(each.run)]

    def _is_over(self) -> bool:
        late = self._first_end is not None and (
            time.monotonic() - self._first_end > 2 * self._grace_seconds + CANCEL_SECONDS
        )
        return late or not self._open()

    def _take(self, update: FlowRun | Progress, stopping: threading.Event) -> None:
        if isinstance(update, Progress):
            if update != self._shown:
                self._shown = update
                self._on_event(update)
            return
        member = self._members[update.id]
        if is_over(member.run):
            return
        member.run = update
        if is_over(update):
            self._first_end = self._first_end or self._end_of_all(update)
            if not member.is_cancelled:
                self._ended.append(update)
        elif update.state_type in _WAITING and not stopping.is_set() and self._first_end is None:
            self._check_wait(member)
        else:
            member.since = time.monotonic()
            self._held_since = self._held_since or member.since

    def _end_of_all(self, ended: FlowRun) -> float | None:
        """Time at which the end of this one came, where it is the end of all."""
        completed = ended.state is not None and ended.state.is_completed()
        # The first node still saves what the others have helped to train.
        if completed and self._number(ended.id) > 1:
            return None
        return time.monotonic()

    def _end_others(self, seconds: float) -> None:
        """Cancels those that go on although one has ended ``seconds`` ago."""
        for each in self._open():
            if each.is_cancelled:
                continue
            # A training's other nodes notice, and say more of it than "cancelled".
            if each.run.state_type in _WAITING or seconds > self._grace_seconds:
                each.is_cancelled = True
                cancel(self._client, each.run.id)

    def _check_wait(self, member: _Member) -> None:
        now = time.monotonic()
        self._check_held(member, now)
        if now < member.next_check or self._failure is not None:
            return
        limit = self._settings.worker_wait_seconds
        member.next_check = now + min(_WARN_SECONDS, limit)
        why = why_nobody_serves(self._client, self._deployment)
        if why is None:
            member.since = now
            self._tell_busy(member)
            return
        self._warn(f"still waiting: {why[0]}. {why[1]}")
        if now - member.since >= limit:
            self._cancel_all()
            raise UserError(f"{self._request.place}: {why[0]}", why[1])

    def _check_held(self, member: _Member, now: float) -> None:
        """Ends an attempt whose nodes at work have waited too long for one that none takes."""
        limit = self._settings.gang_wait_seconds
        # One that is pending is with a worker, which fetches an image or starts a host for it.
        if self._held_since is None or member.run.state_type != StateType.SCHEDULED:
            return
        if now - self._held_since < limit:
            return
        self._failure = StageFailedError(
            f"{self._request.place}: no worker has taken {self._name_of(member)} in {limit:g} s "
            f"(execution.work_pool.gang_wait_seconds), while the other nodes waited for it; "
            f"{self._places()}"
        )
        # The next attempt must not find flow runs that are still ending.
        self._first_end = now
        self._cancel_all()

    def _tell_busy(self, member: _Member) -> None:
        """Warning, given once: no worker has taken this node, and the others wait for it."""
        if self._held_since is not None and not member.told:
            member.told = True
            self._warn(
                f"{self._name_of(member)} waits for a free worker, and the other nodes for it; "
                f"{self._places()}"
            )

    def _name_of(self, member: _Member) -> str:
        return f"node {self._number(member.run.id)} of {len(self._members)}"

    def _places(self) -> str:
        pool, of = self._deployment.work_pool_name, self._deployment.work_queue_name
        return f"work pool {pool!r}, queue {of!r}: {places(self._client, self._deployment)}"

    def _cancel_all(self) -> None:
        for each in self._open():
            each.is_cancelled = True
            cancel(self._client, each.run.id)

    def _number(self, flow_run_id: UUID) -> int:
        return list(self._members).index(flow_run_id) + 1

    def _warn(self, message: str) -> None:
        self._on_event(Log(level="warning", message=message))
