"""Overlap: a flow run that starts while an earlier one of its deployment is still at work.

The choices are those of Prefect's own limit on a deployment's runs (enqueue, cancel new), and one
that it lacks: the earlier run gives way, as with ``Replace`` of a Kubernetes CronJob.
"""

from __future__ import annotations

import threading
from typing import Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling

from flows.execution.cancellation import stops_when_cancelled
from flows.execution.outage import survives_outage
from stages.contract.errors import RunCancelledError

Overlap = Literal["go_on", "wait", "skip", "cancel_earlier"]

_AT_WORK = [StateType.RUNNING, StateType.CANCELLING]
# Between two requests to the server, of about 10 ms each.
_POLL_SECONDS = 2.0


def settle_overlap(choice: Overlap) -> None:
    """Does what is chosen about earlier runs of this flow run's deployment; says so in its log.

    A flow run without a deployment (of a terminal, or part of another run) has no earlier ones.

    Args:
        choice: ``go_on`` lets both run; ``wait`` returns when the earlier ones are over; ``skip``
            ends this one; ``cancel_earlier`` cancels the earlier ones and waits for their end.

    Raises:
        RunCancelledError: This run is skipped, or was cancelled while it waited.
    """
    if not _deployment_id():
        return
    with get_client(sync_client=True) as client:
        earlier = _earlier_runs(client)
        if not earlier:
            return
        names = ", ".join(repr(run.name) for run in earlier)
        if choice == "skip":
            raise RunCancelledError(f"skipped: {names} of this deployment is still at work")
        said = {"go_on": "this run goes on beside it", "wait": "this run waits for its end"}
        answer = said.get(choice, "it is cancelled")
        get_run_logger().warning("%s of this deployment is still at work: %s", names, answer)
        if choice == "cancel_earlier":
            for run in earlier:
                client.set_flow_run_state(run.id, Cancelling())
        if choice != "go_on":
            _wait(client, names)


def _wait(client: SyncPrefectClient, names: str) -> None:
    stopped = threading.Event()
    with stops_when_cancelled(stopped.set, f"the wait for {names}"):
        while _earlier_runs(client):
            if stopped.wait(_POLL_SECONDS):
                raise RunCancelledError(f"cancelled while it waited for {names}")


@survives_outage
def _deployment_id() -> str | None:
    # Prefect asks its server for it, even where there is none.
    found: str | None = deployment.id
    return found


@survives_outage
def _earlier_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Runs of this deployment that are at work and began before this one."""
    at_work = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[UUID(deployment.id)]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_AT_WORK)),
        )
    )
    # Of two that begin at once, one is the earlier for both.
    began = {run.id: (run.start_time, run.id) for run in at_work if run.start_time}
    own = began.get(UUID(flow_run.id))
    return [run for run in at_work if own and run.id in began and began[run.id] < own]
