"""Flow and task runs of killed processes: Crashed in Prefect, where nothing else says so.

An automation of the server of `geb up` knows of flow runs only; of task runs nothing does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from flows.execution.attempts import attempts, forget_flow_runs
from flows.execution.outage import survives_outage
from flows.execution.run_record import RunRecord

_MESSAGE = "its process was killed, or its machine went down"
_UNDER_WAY = [StateType.RUNNING, StateType.PENDING]
_LOGGER = logging.getLogger(__name__)


@survives_outage
def present_flow_runs() -> tuple[str, ...]:
    """Ids of the present flow run and of the outermost one that it is part of."""
    found = (flow_run.id, flow_run.root_flow_run_id)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def mark_crashed(record: RunRecord, present: Sequence[str] = ()) -> list[str]:
    """Marks flow runs as Crashed whose process on this host is gone without having said so.

    Their tasks under way end with them; so do those that a flow run left when it was killed and is
    under way again. A server that does not know a flow run, or does not answer, is left alone.

    Args:
        record: The run whose attempts they were.
        present: Ids of flow runs that are under way again, before they start a task: *Retry* keeps
            the id. The first is the run's own; others may have tasks that live.

    Returns:
        Names of the flow runs.
    """
    marked = []
    tried = attempts(record)
    alive = {*present, *(id for each in tried if each.state == "running" for id in each.flow_runs)}
    crashed = [each for each in tried if each.state == "crashed" and each.flow_runs]
    if not crashed:
        return []
    with get_client(sync_client=True) as client:
        for attempt in crashed:
            try:
                for each in map(UUID, set(attempt.flow_runs) - alive):
                    found = client.read_flow_run(each)
                    state = found.state
                    # One that waits for a retry has a future.
                    if state is not None and (state.is_running() or state.is_cancelling()):
                        client.set_flow_run_state(each, Crashed(message=_MESSAGE), force=True)
                        marked.append(found.name)
                    end_tasks(client, each)
                if present and present[0] in attempt.flow_runs:
                    end_tasks(client, UUID(present[0]))
            except ObjectNotFound:
                # Of another server, which may be asked another time.
                continue
            except Exception as error:
                _LOGGER.warning("flow runs of killed processes stay Running: %s", error)
                break
            forget_flow_runs(record, attempt)
    return marked


def end_tasks(client: SyncPrefectClient, flow_run: UUID) -> None:
    """Marks the tasks of a flow run as Crashed that are still said to be under way."""
    left = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_UNDER_WAY))
        ),
    )
    for each in left:
        client.set_task_run_state(each.id, Crashed(message=_MESSAGE), force=True)
