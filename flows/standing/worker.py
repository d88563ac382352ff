"""Prefect worker whose flow runs end as Crashed when it ends, not Running for ever.

Prefect's own worker, on SIGTERM, kills the flow runs below it, and they stay Running. Here each of
them gets SIGTERM first: it stops its stages and reports itself Crashed, and Retry resumes it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed

from flows.execution.crashed import end_tasks

_WORKER_LABEL = "prefect.worker.name"
_ENDED = "its worker was ended; Retry goes on with what is not done yet"
# A stage gets its own grace period from its supervisor; the flow run above it must outlive that.
GRACE_SECONDS = 60.0


class Worker:
    """A worker under the supervisor: it ends with this process, and so does all below it.

    Args:
        arguments: For ``prefect worker start``.
        output: Where its output goes; None means where that of this process goes.
        environment: Variables beside this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: IO[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "stages.contract.supervisor"),
                *("--grace", str(GRACE_SECONDS), "--"),
                *(sys.executable, "-m", "prefect", "worker", "start"),
                *("--install-policy", "never", *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )

    def wait(self) -> int:
        """Waits until it ends by itself; returns its exit code."""
        return self.process.wait()

    def end(self) -> None:
        """Ends the flow runs below it, each of which reports its end, and then the worker."""
        for worker in _children(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                # Halted, it takes no further flow run and does not kill those that it has.
                os.kill(worker, signal.SIGSTOP)
                try:
                    _end_all(_children(worker))
                finally:
                    os.kill(worker, signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def report_left_runs(pool: str, worker: str) -> list[str]:
    """Marks flow runs that an ended worker left Running as Crashed, and their tasks.

    Args:
        pool: The work pool.
        worker: Name of the worker; no other may have it.

    Returns:
        Names of the flow runs.
    """
    under_way = FlowRunFilter(
        state=FlowRunFilterState(
            type=FlowRunFilterStateType(
                any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
            )
        )
    )
    of_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=under_way, work_pool_filter=of_pool)
        # Another machine's worker may serve the same pool.
        left = [run for run in found if run.labels.get(_WORKER_LABEL) == worker]
        for run in left:
            client.set_flow_run_state(run.id, Crashed(message=_ENDED), force=True)
            end_tasks(client, run.id)
    return [run.name for run in left]


def _end_all(pids: Iterable[int]) -> None:
    """Sends SIGTERM to processes and waits for their end, at most the grace period."""
    watched = select.poll()
    left = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            left.add(descriptor)
            watched.register(descriptor, select.POLLIN)
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while left and (rest := deadline - time.monotonic()) > 0:
        for descriptor, _ in watched.poll(rest * 1000):
            watched.unregister(descriptor)
            left.discard(descriptor)
            os.close(descriptor)
    for descriptor in left:
        os.close(descriptor)


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in task.read_text().split()]
    return found
