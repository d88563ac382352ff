"""Flow runs of killed processes: Crashed in Prefect, where no automation of the server says so."""

from __future__ import annotations

import logging
from collections.abc import Collection
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Crashed

from flows.execution.attempts import attempts, forget_flow_runs
from flows.execution.run_record import RunRecord

_MESSAGE = "its process was killed, or its machine went down"
_LOGGER = logging.getLogger(__name__)


def present_flow_runs() -> tuple[str, ...]:
    """Ids of the present flow run and of the outermost one that it is part of."""
    found = (flow_run.id, flow_run.root_flow_run_id)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def mark_crashed(record: RunRecord, present: Collection[str] = ()) -> list[str]:
    """Marks flow runs as Crashed whose process on this host is gone without having said so.

    A server that does not know a flow run, or does not answer, is left alone.

    Args:
        record: The run whose attempts they were.
        present: Ids of flow runs that are under way again: *Retry* keeps the id.

    Returns:
        Names of the flow runs.
    """
    marked = []
    tried = attempts(record)
    alive = {*present, *(id for each in tried if each.state == "running" for id in each.flow_runs)}
    with get_client(sync_client=True) as client:
        for attempt in tried:
            if attempt.state != "crashed" or not attempt.flow_runs:
                continue
            try:
                for each in map(UUID, set(attempt.flow_runs) - alive):
                    found = client.read_flow_run(each)
                    state = found.state
                    # One that waits for a retry has a future.
                    if state is not None and (state.is_running() or state.is_cancelling()):
                        client.set_flow_run_state(each, Crashed(message=_MESSAGE), force=True)
                        marked.append(found.name)
            except ObjectNotFound:
                # Of another server, which may be asked another time.
                continue
            except Exception as error:
                _LOGGER.warning("flow runs of killed processes stay Running: %s", error)
                break
            forget_flow_runs(record, attempt)
    return marked
