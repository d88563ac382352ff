"""End of a flow run's stages by its cancellation in the Prefect UI or API.

Prefect's worker ends the flow run's process when it is cancelled; a flow run that was started in a
terminal has no worker that could. So every run polls its own state, every two seconds.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateType
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run as present

from flows.execution.prefect_api import survives_outage
from flows.execution.run_record import StepState
from stages.contract.errors import RunCancelledError, RunInterruptedError

# Between two requests to the server, of about 10 ms each.
_POLL_SECONDS = 2.0
_CANCEL = (StateType.CANCELLING, StateType.CANCELLED)


@contextmanager
def stops_when_cancelled(
    stop: Callable[[StepState], None], interrupt: threading.Event, what: str
) -> Iterator[None]:
    """Stops the work of the block when its flow run, or one that it is part of, is cancelled.

    An ``interrupt`` does so, too. ``stop`` is called from another thread, with the state of what it
    ends.

    Raises:
        RunCancelledError: It was cancelled; its cause is the error that the stopped steps raised.
        RunInterruptedError: The interrupt came, and not as an exception; likewise.
    """
    ids = _own_flow_runs()
    ended = threading.Event()
    causes: list[RunCancelledError] = []

    def poll() -> None:
        with get_client(sync_client=True) as client:
            is_last = False
            while not is_last:
                is_last = ended.wait(_POLL_SECONDS)
                if _is_cancelled(client, ids):
                    causes.append(RunCancelledError(f"{what} was cancelled in Prefect"))
                    stop("cancelled")
                    return
                if interrupt.is_set():
                    causes.append(RunInterruptedError(f"{what} was interrupted"))
                    stop("stopped")
                    return

    poller = threading.Thread(target=poll, name="cancellation", daemon=True)
    poller.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, TerminationSignal):
            # The worker that cancels a run sends SIGTERM, maybe before the next request.
            ended.set()
            poller.join(timeout=60)
        if causes and not isinstance(error, KeyboardInterrupt):
            raise causes[0] from error
        raise
    finally:
        # Not joined: its request may wait for a server that is gone.
        ended.set()


@survives_outage
def _own_flow_runs() -> list[UUID]:
    """The present flow run and its parents."""
    ids = (present.id, present.parent_flow_run_id, present.root_flow_run_id)
    return list({UUID(run) for run in ids if run is not None})


def _is_cancelled(client: SyncPrefectClient, ids: list[UUID]) -> bool:
    try:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids)))
    except Exception:
        # A server that is away for a while does not end a run.
        return False
    return any(run.state_type in _CANCEL for run in runs)
