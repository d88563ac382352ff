"""Work-pool runner: sends each stage to a Prefect work pool, whose worker starts it on its host.

A stage becomes a flow run of the deployment that its resources ask for. A flow run's idempotency
key is made of run, step, key and attempt: an orchestrator that was killed and comes back finds the
flow run that it had started, and waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from flows.pipeline.placement import Execution
from flows.runners.base import OnEvent
from flows.runners.local.bucket_inputs import upload_inputs
from flows.runners.work_pool.flow_runs import (
    FlowRunPoller,
    StageFailure,
    cancel,
    find_attempts,
    idempotency_key,
    is_over,
)
from flows.runners.work_pool.waiting import FlowRunWait
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Log
from stages.contract.request import Request

_CHECK_SECONDS = 0.5
# Beside the grace period: a worker sees a cancellation when it polls, and reports the end.
_CANCEL_SECONDS = 60.0
_LOGGER = logging.getLogger(__name__)


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
        self._stopping = threading.Event()
        self._gave_up = threading.Event()

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        upload_inputs(request)
        with get_client(sync_client=True) as client:
            deployment = self._deployment(client, request)
            run = self._find_or_start(client, deployment, request, on_event)
            with self._lock:
                self._live.add(run.id)
                stopping = self._stopping.is_set()
            try:
                if stopping:
                    cancel(client, run.id)
                pool, of = deployment.work_pool_name, deployment.work_queue_name
                on_event(Log(message=f"in work pool {pool}, queue {of}: flow run {run.id}"))
                waiting = FlowRunWait(client, deployment, request, self._settings, on_event)
                ended = waiting.wait(run, self._poller, self._stopping, self._gave_up)
                self._raise_for(client, ended, request)
            finally:
                with self._lock:
                    self._live.discard(run.id)

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._lock:
            self._stopping.set()
            live = set(self._live)
        if not live:
            return
        deadline = time.monotonic() + self._execution.grace_seconds + _CANCEL_SECONDS
        with get_client(sync_client=True) as client:
            for each in live:
                cancel(client, each)
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
            attempts = find_attempts(client, request)
        return any(not is_over(each) for each in attempts)

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
        """The flow run of one attempt: that of a dead orchestrator, or a new one."""
        attempts = {each.idempotency_key: each for each in find_attempts(client, request)}
        for attempt in range(len(attempts)):
            found = attempts.get(idempotency_key(request, attempt))
            if found is not None and not is_over(found):
                on_event(Log(message=f"goes on waiting for flow run {found.name!r} ({found.id})"))
                return found
        started = run_deployment(
            deployment.id,
            parameters={
                "request": request.model_dump(mode="json"),
                "execution": self._execution.model_dump(mode="json"),
            },
            timeout=0,
            tags=[f"run:{request.run}"],
            idempotency_key=idempotency_key(request, len(attempts)),
            job_variables=self._settings.job_variables.get(request.stage),
        )
        assert isinstance(started, FlowRun)
        return started

    def _raise_for(self, client: SyncPrefectClient, ended: FlowRun, request: Request) -> None:
        """Raises the error that the end of a flow run stands for; returns if it completed."""
        where = f"{request.place} ({request.stage} {request.key[:12]})"
        if ended.state is not None and ended.state.is_completed():
            return
        if self._stopping.is_set():
            raise StoppedError(f"{where}: stopped")
        raise _error_of(client, ended, where)


def _error_of(client: SyncPrefectClient, run: FlowRun, where: str) -> UserError | StageFailedError:
    """The error that the end of a flow run stands for."""
    state = run.state
    assert state is not None
    if state.is_cancelled():
        return UserError(
            f"{where}: its flow run {run.name!r} was cancelled in Prefect",
            "resume the run to start the stage again",
        )
    failure = StageFailure.read(client, run.id)
    if failure is not None:
        return failure.error()
    # A worker that is drained or killed reports its flow runs as Crashed, and so does the
    # automation on those whose heartbeat is missed.
    made = PreemptedError if state.is_crashed() else StageFailedError
    return made(
        f"{where}: flow run {run.name!r} ended {state.name}: {state.message}",
        tuple((state.message or "").splitlines()),
    )
