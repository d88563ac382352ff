"""Polling of the flow runs on workers by the orchestrator that waits for them.

One thread polls all of them with two requests a round.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import FlowRun

from stages.contract.events import Progress

T = TypeVar("T")

# Most that Prefect returns at once.
_PAGE = 200
_SHOWN = re.compile(r"(\d+)/(\d+) (.*)")
_LOGGER = logging.getLogger(__name__)

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
