"""Flow runs of a stage on workers: found by what they compute, and cancelled."""

from __future__ import annotations

import logging
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

from stages.contract.request import Request

# More attempts at one step than anybody makes; one request asks for all of them.
_MAX_ATTEMPTS = 100
_LOGGER = logging.getLogger(__name__)


def idempotency_key(request: Request, attempt: int, node: int = 0) -> str:
    """Key under which a Prefect server makes one flow run, however often it is asked to."""
    # The step holds the iteration; the store, since what another one has is of no use to this run.
    parts = [request.store, request.run, request.step, request.stage, request.key, str(attempt)]
    return "/".join([*parts, f"node-{node}"] if node else parts)


def find_attempts(client: SyncPrefectClient, request: Request) -> list[FlowRun]:
    """Flow runs of the first node, one for each attempt that was made at a request."""
    return _find(client, [idempotency_key(request, attempt) for attempt in range(_MAX_ATTEMPTS)])


def cancel_others(client: SyncPrefectClient, request: Request, attempt: int, nodes: int) -> None:
    """Cancels what a dead orchestrator left of an attempt whose first node has ended."""
    keys = [idempotency_key(request, attempt, node) for node in range(1, nodes)]
    for left in _find(client, keys) if keys else []:
        cancel(client, left.id)


def is_over(run: FlowRun) -> bool:
    """True once a flow run has ended."""
    return run.state is not None and run.state.is_final()


def cancel(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Cancels a flow run; one that has ended by now stays as it is."""
    try:
        if not is_over(client.read_flow_run(flow_run_id)):
            client.set_flow_run_state(flow_run_id, Cancelling())
    except Exception as error:
        # A server that is gone must not keep the other flow runs from being cancelled.
        _LOGGER.error("cannot cancel flow run %s: %s", flow_run_id, error)


def _find(client: SyncPrefectClient, keys: list[str]) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=keys))
    )


def node_count(request: Request) -> int:
    """Number of flow runs of an attempt: one for each node that a worker starts."""
    # Where a person starts the other nodes, there is an address at which they meet.
    return 1 if request.resources.rendezvous else request.resources.nodes
