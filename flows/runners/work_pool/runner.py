"""Work-pool runner: sends each stage to a Prefect work pool, whose worker starts it on its host.

A stage becomes a flow run of the deployment that its resources ask for, a training on several nodes
one for each. A flow run's idempotency key is made of run, step, key and attempt: an orchestrator
that was killed and comes back finds the flow runs that it had started, and waits for those.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
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
    cancel_others,
    find_attempts,
    idempotency_key,
    is_over,
    node_count,
)
from flows.runners.work_pool.gang import CANCEL_SECONDS, Gang, too_few_places
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Log
from stages.contract.request import Request

_CHECK_SECONDS = 0.5
_LOGGER = logging.getLogger(__name__)
# Of several nodes' failures the first of these kinds counts: the others follow from it.
_BY_WEIGHT = (UserError, PreemptedError, StageFailedError)


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
            nodes = node_count(request)
            if nodes > 1 and (why := too_few_places(client, deployment, nodes)) is not None:
                raise UserError(f"{request.place}: {why[0]}", why[1])
            runs = self._find_or_start(client, deployment, request, on_event)
            with self._lock:
                self._live.update(each.id for each in runs)
                stopping = self._stopping.is_set()
            try:
                if stopping:
                    for each in runs:
                        cancel(client, each.id)
                pool, of = deployment.work_pool_name, deployment.work_queue_name
                ids = ", ".join(str(each.id) for each in runs)
                on_event(Log(message=f"in work pool {pool}, queue {of}: flow run {ids}"))
                gang = Gang(
                    client,
                    runs,
                    deployment,
                    request,
                    self._settings,
                    self._execution.grace_seconds,
                    on_event,
                )
                ended = gang.wait(self._poller, self._stopping, self._gave_up)
                self._raise_for(client, runs[0].id, ended, request)
            finally:
                with self._lock:
                    self._live.difference_update(each.id for each in runs)

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._lock:
            self._stopping.set()
            live = set(self._live)
        if not live:
            return
        deadline = time.monotonic() + self._execution.grace_seconds + CANCEL_SECONDS
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
    ) -> list[FlowRun]:
        """The flow runs of one attempt: those of a dead orchestrator, or new ones."""
        nodes = node_count(request)
        attempts = {each.idempotency_key: each for each in find_attempts(client, request)}
        for attempt in range(len(attempts)):
            found = attempts.get(idempotency_key(request, attempt))
            if found is not None and not is_over(found):
                on_event(Log(message=f"goes on waiting for flow run {found.name!r} ({found.id})"))
                others = range(1, nodes)
                break
        else:
            attempt, found, others = len(attempts), None, range(nodes)
            if attempt:
                cancel_others(client, request, attempt - 1, nodes)
        started = [self._start(deployment, request, attempt, node) for node in others]
        return [found, *started] if found is not None else started

    def _start(
        self, deployment: DeploymentResponse, request: Request, attempt: int, node: int
    ) -> FlowRun:
        """A flow run of one node; the one that is there, if it has been started before."""
        parameters = {
            "request": request.model_dump(mode="json"),
            "execution": self._execution.model_dump(mode="json"),
        }
        started = run_deployment(
            deployment.id,
            parameters=parameters | ({"node": node} if node else {}),
            timeout=0,
            tags=[f"run:{request.run}"],
            idempotency_key=idempotency_key(request, attempt, node),
            job_variables=self._settings.job_variables.get(request.stage),
        )
        assert isinstance(started, FlowRun)
        return started

    def _raise_for(
        self, client: SyncPrefectClient, first: UUID, ended: Sequence[FlowRun], request: Request
    ) -> None:
        """Raises the error that the ends of flow runs stand for; returns if the first completed."""
        where = f"{request.place} ({request.stage} {request.key[:12]})"
        completed = [each for each in ended if each.state is not None and each.state.is_completed()]
        if any(each.id == first for each in completed):
            return
        if self._stopping.is_set():
            raise StoppedError(f"{where}: stopped")
        errors = [_error_of(client, each, where) for each in ended if each not in completed]
        raise min(errors, key=_weight)


def _weight(error: UserError | StageFailedError) -> int:
    return next(place for place, kind in enumerate(_BY_WEIGHT) if isinstance(error, kind))


def _error_of(client: SyncPrefectClient, run: FlowRun, where: str) -> UserError | StageFailedError:
    """The error that the end of a flow run stands for."""
    state = run.state
    if state is None or not state.is_final():
        return PreemptedError(
            f"{where}: flow run {run.name!r} has not ended although it was cancelled: nothing is "
            "heard of its worker"
        )
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
