"""Flow runs of a stage on workers: found by what they compute, polled, cancelled, their failures.

One thread polls all of them with two requests a round. Prefect keeps only the message of a failure:
the rest is in an artifact of the flow run, a table that a person can read as well.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar
from uuid import UUID

from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterIdempotencyKey,
)
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling
from pydantic import BaseModel

from stages.contract.errors import PreemptedError, StageFailedError, UserError
from stages.contract.events import Progress
from stages.contract.request import Request

# More attempts at one step than anybody makes; one request asks for all of them.
_MAX_ATTEMPTS = 100
_LOGGER = logging.getLogger(__name__)


def idempotency_key(request: Request, attempt: int) -> str:
    """Key under which a Prefect server makes one flow run, however often it is asked to."""
    # The step holds the iteration; the store, since what another one has is of no use to this run.
    place = (request.store, request.run, request.step, request.stage, request.key)
    return "/".join((*place, str(attempt)))


def find_attempts(client: SyncPrefectClient, request: Request) -> list[FlowRun]:
    """Flow runs of a request, one for each attempt that was made at it."""
    keys = [idempotency_key(request, attempt) for attempt in range(_MAX_ATTEMPTS)]
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=keys))
    )


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


T = TypeVar("T")

# Most that Prefect returns at once.
_PAGE = 200
_SHOWN = re.compile(r"(\d+)/(\d+) (.*)")

Update = FlowRun | Progress


class FlowRunPoller:
    """Polls flow runs and passes on state and progress of each.

    Args:
        poll_seconds: Time between two rounds.
    """

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._lock = threading.Lock()
        self._watched: dict[UUID, queue.SimpleQueue[Update]] = {}
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, *flow_run_ids: UUID) -> Iterator[queue.SimpleQueue[Update]]:
        """A queue of updates: once a round each flow run with its state, and its progress."""
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        with self._lock:
            self._watched |= dict.fromkeys(flow_run_ids, updates)
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._poll, name="flow-run-poller", daemon=True
                )
                self._thread.start()
        try:
            yield updates
        finally:
            with self._lock:
                for each in flow_run_ids:
                    del self._watched[each]
                if not self._watched:
                    self._wanted.clear()

    def _poll(self) -> None:
        rest = threading.Event()
        with get_client(sync_client=True) as client:
            while True:
                self._wanted.wait()
                with self._lock:
                    ids = list(self._watched)
                try:
                    for page in _pages(ids):
                        self._poll_page(client, page)
                except Exception as error:
                    # The server may be away for a while; the flow runs go on without it.
                    _LOGGER.debug("cannot see flow runs on workers: %s", error)
                rest.wait(self._poll_seconds)

    def _poll_page(self, client: SyncPrefectClient, ids: Sequence[UUID]) -> None:
        # Progress first: the queue is not read any more once the flow run has ended.
        progress = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=list(ids)),
                type=ArtifactFilterType(any_=["progress"]),
            )
        )
        for artifact in progress:
            shown = _SHOWN.fullmatch(artifact.description or "")
            if shown is not None and artifact.flow_run_id is not None:
                done, total, unit = shown.groups()
                event = Progress(done=int(done), total=int(total), unit=unit)
                self._put(artifact.flow_run_id, event)
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(ids)))
        )
        for run in runs:
            self._put(run.id, run)

    def _put(self, flow_run_id: UUID, update: Update) -> None:
        with self._lock:
            if (updates := self._watched.get(flow_run_id)) is not None:
                updates.put(update)


def _pages(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _PAGE):
        yield items[start : start + _PAGE]


# A table with this first column is a failure.
_FIELD = "failure"
_VALUE = "is"
# Keeps the artifact far below what makes the UI slow.
_MAX_CHARACTERS = 20_000


class StageFailure(BaseModel):
    """Reason why a stage's flow run failed.

    Attributes:
        kind: A person's mistake, which no retry cures, something that one may, or a machine that
            was taken away.
        message: What went wrong.
        remedy: What a person can do about it.
        last_lines: The end of the stage's log.
    """

    kind: Literal["user", "stage", "preempted"]
    message: str
    remedy: str = ""
    last_lines: str = ""

    @classmethod
    def of(cls, error: UserError | StageFailedError) -> StageFailure:
        """Describes an error that a runner raised."""
        if isinstance(error, UserError):
            return cls(kind="user", message=error.message, remedy=error.remedy)
        lines = "\n".join(error.last_lines)[-_MAX_CHARACTERS:]
        kind: Literal["stage", "preempted"] = (
            "preempted" if isinstance(error, PreemptedError) else "stage"
        )
        return cls(kind=kind, message=str(error), last_lines=lines)

    def error(self) -> UserError | StageFailedError:
        """The error that :meth:`of` described."""
        if self.kind == "user":
            return UserError(self.message, self.remedy)
        made = PreemptedError if self.kind == "preempted" else StageFailedError
        return made(self.message, tuple(self.last_lines.splitlines()))

    def publish(self, key: str) -> None:
        """Creates the artifact; to be called inside the flow run."""
        rows = [{_FIELD: name, _VALUE: value} for name, value in self.model_dump().items()]
        create_table_artifact(rows, key=key, description="Why this stage failed.")

    @classmethod
    def read(cls, client: SyncPrefectClient, flow_run_id: UUID) -> StageFailure | None:
        """The failure that a flow run left, or None."""
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
                type=ArtifactFilterType(any_=["table"]),
            )
        )
        for artifact in found:
            rows = json.loads(artifact.data) if isinstance(artifact.data, str) else []
            if rows and _FIELD in rows[0]:
                return cls.model_validate({each[_FIELD]: each[_VALUE] for each in rows})
        return None
