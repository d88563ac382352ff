"""Work-pool runner: sends each stage to a Prefect work pool, whose worker starts it on its host.

A stage becomes a flow run of the deployment that its resources ask for. The flow run's idempotency
key is made of run, step, key and attempt: an orchestrator that was killed and comes back finds the
flow run that it had started, and waits for that one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from flows.pipeline.placement import Execution
from flows.runners.base import OnEvent
from flows.runners.local.bucket_inputs import upload_inputs
from flows.runners.work_pool.failure import StageFailure
from flows.runners.work_pool.health import why_nobody_serves
from flows.runners.work_pool.polling import FlowRunPoller
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Log, Progress
from stages.contract.request import Request

# More attempts at one step than anybody makes; one request asks for all of them.
_MAX_ATTEMPTS = 100
# A worker sees a cancellation when it polls, and reports when the stage has ended.
_CANCEL_SECONDS = 60.0
# Between two warnings that no worker takes a stage.
_WARN_SECONDS = 60.0
# A worker takes what it is sent within this time, or somebody should know.
_PATIENCE_SECONDS = 20.0
_CHECK_SECONDS = 0.5
_LOGGER = logging.getLogger(__name__)
_WAITING = (StateType.SCHEDULED, StateType.PENDING)


class WorkPoolRunner:
    """Runs stages on the workers of Prefect work pools; to be used inside a flow run.

    Args:
        execution: Deployments, job variables, and how a worker's host starts a stage.
    """

    name = "work_pool"

    def __init__(self, execution: Execution) -> None:
        self._settings = execution.work_pool
        self._execution = execution.model_copy(update={"runner": self._settings.launcher})
        self._poller = FlowRunPoller(self._settings.poll_seconds)
        self._live: set[UUID] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._gave_up = threading.Event()

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        upload_inputs(request)
        with get_client(sync_client=True) as client:
            deployment = self._deployment(client, request)
            child = self._find_or_start(client, deployment, request, on_event)
            with self._lock:
                self._live.add(child.id)
                stopping = self._stopping
            try:
                if stopping:
                    _cancel(client, child.id)
                ended = self._wait(client, child, deployment, request, on_event)
                self._raise_for(client, ended, request)
            finally:
                with self._lock:
                    self._live.discard(child.id)

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._lock:
            self._stopping = True
            live = set(self._live)
        if not live:
            return
        deadline = time.monotonic() + self._execution.grace_seconds + _CANCEL_SECONDS
        with get_client(sync_client=True) as client:
            for each in live:
                _cancel(client, each)
        while time.monotonic() < deadline:
            with self._lock:
                if not self._live & live:
                    return
            time.sleep(_CHECK_SECONDS)
        _LOGGER.error("on no worker ended by now: %s", ", ".join(str(each) for each in live))
        self._gave_up.set()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        with get_client(sync_client=True) as client:
            attempts = _attempts(client, request)
        return any(not _is_over(each) for each in attempts)

    def _deployment(self, client: SyncPrefectClient, request: Request) -> DeploymentResponse:
        on_gpu = request.resources.gpus > 0
        field = "gpu_deployment" if on_gpu else "cpu_deployment"
        name: str = getattr(self._settings, field)
        try:
            return client.read_deployment_by_name(name)
        except ObjectNotFound:
            raise UserError(
                f"execution.work_pool.{field}: Prefect has no deployment {name!r}, which "
                f"{request.place} is to run on",
                "create it (`prefect deploy --all` with the project's prefect.yaml), or name the "
                "deployment of the flow `stage` that is there",
            ) from None

    def _find_or_start(
        self,
        client: SyncPrefectClient,
        deployment: DeploymentResponse,
        request: Request,
        on_event: OnEvent,
    ) -> FlowRun:
        attempts = _attempts(client, request)
        for each in attempts:
            if not _is_over(each):
                on_event(Log(message=f"goes on waiting for flow run {each.name!r} ({each.id})"))
                return each
        started = run_deployment(
            deployment.id,
            parameters={
                "request": request.model_dump(mode="json"),
                "execution": self._execution.model_dump(mode="json"),
            },
            timeout=0,
            tags=[f"run:{request.run}"],
            idempotency_key=_idempotency_key(request, len(attempts)),
            job_variables=self._settings.job_variables.get(request.stage),
        )
        assert isinstance(started, FlowRun)
        return started

    def _wait(
        self,
        client: SyncPrefectClient,
        child: FlowRun,
        deployment: DeploymentResponse,
        request: Request,
        on_event: OnEvent,
    ) -> FlowRun:
        """Waits until the flow run has ended, and warns while no worker takes it."""
        waiting_since = time.monotonic()
        next_check = waiting_since + min(_PATIENCE_SECONDS, self._settings.worker_wait_seconds)
        shown: Progress | None = None
        place = f"work pool {deployment.work_pool_name}, queue {deployment.work_queue_name}"
        on_event(Log(message=f"in {place}: flow run {child.id}"))
        with self._poller.watched(child.id) as updates:
            while True:
                try:
                    update = updates.get(timeout=_CHECK_SECONDS)
                except queue.Empty:
                    if self._gave_up.is_set():
                        return child
                    continue
                if isinstance(update, Progress):
                    if update != shown:
                        shown = update
                        on_event(update)
                    continue
                if _is_over(update):
                    return update
                now = time.monotonic()
                if update.state_type not in _WAITING or self._stopping:
                    waiting_since = now
                    continue
                if now < next_check:
                    continue
                next_check = now + min(_WARN_SECONDS, self._settings.worker_wait_seconds)
                why = why_nobody_serves(client, deployment)
                if why is None:
                    waiting_since = now
                    continue
                on_event(Log(level="warning", message=f"still waiting: {why[0]}. {why[1]}"))
                if now - waiting_since >= self._settings.worker_wait_seconds:
                    _cancel(client, child.id)
                    raise UserError(f"{request.place}: {why[0]}", why[1])

    def _raise_for(self, client: SyncPrefectClient, ended: FlowRun, request: Request) -> None:
        """Raises the error that the end of a flow run stands for; returns if it completed."""
        state = ended.state
        if state is not None and state.is_completed():
            return
        where = f"{request.place} ({request.stage} {request.key[:12]})"
        if self._stopping or state is None:
            raise StoppedError(f"{where}: stopped")
        if state.is_cancelled():
            raise UserError(
                f"{where}: its flow run {ended.name!r} was cancelled in Prefect",
                "resume the run to start the stage again",
            )
        failure = StageFailure.read(client, ended.id)
        if failure is not None:
            raise failure.error()
        # A worker that is drained or killed reports its flow runs as Crashed, and so does the
        # automation on those whose heartbeat is missed.
        made = PreemptedError if state.is_crashed() else StageFailedError
        raise made(
            f"{where}: flow run {ended.name!r} ended {state.name}: {state.message}",
            tuple((state.message or "").splitlines()),
        )


def _idempotency_key(request: Request, attempt: int) -> str:
    # The step holds the iteration; the store, since what another one has is of no use to this run.
    parts = (request.store, request.run, request.step, request.stage, request.key, str(attempt))
    return "/".join(parts)


def _attempts(client: SyncPrefectClient, request: Request) -> list[FlowRun]:
    """All flow runs that were started for a request."""
    keys = [_idempotency_key(request, attempt) for attempt in range(_MAX_ATTEMPTS)]
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=keys))
    )


def _is_over(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def _cancel(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    try:
        # A flow run that has ended by now stays as it is.
        if not _is_over(client.read_flow_run(flow_run_id)):
            client.set_flow_run_state(flow_run_id, Cancelling())
    except Exception as error:
        # A server that is gone must not keep the other flow runs from being cancelled.
        _LOGGER.error("cannot cancel flow run %s: %s", flow_run_id, error)
