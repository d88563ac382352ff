"""Several nodes of one attempt: whose end is the end of all, without cluster and server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, Worker, WorkerStatus, WorkPool, WorkQueue
from prefect.client.schemas.responses import DeploymentResponse
from prefect.states import Cancelled, Completed, Failed, Late, Pending, Running, Scheduled, State

from flows.pipeline.kubernetes import KubernetesSettings
from flows.pipeline.placement import WorkPoolSettings
from flows.runners.kubernetes.attempt import PodAttempt
from flows.runners.kubernetes.watch import PodChange
from flows.runners.work_pool.gang import Gang, too_few_places
from stages.contract.errors import StageFailedError
from stages.contract.local_store import LocalStore
from stages.contract.request import Request, Resources
from tests.probe_requests import probe_request


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    return probe_request(store, Resources(nodes=2))


def pod(name: str, code: int | None = None) -> dict[str, Any]:
    """A pod that runs, or has ended with an exit code."""
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"image": "geb-torch:1"}]},
        "status": {"phase": "Running", "containerStatuses": [{"state": state}]},
    }


class Pods:
    """Two pods whose ends come one after the other; deleted ones end by SIGTERM.

    Args:
        ended: Pods that have ended, with their exit codes.
        later: Pods that end when those that watch have had one more round.
    """

    server = "here"

    def __init__(self, ended: tuple[str, int], *later: tuple[str, int]) -> None:
        self.deleted: list[str] = []
        self._ended = ended
        self._later = list(later)
        self._changes: queue.SimpleQueue[Any] = queue.SimpleQueue()

    @contextmanager
    def watched(self, names: list[str], changes: queue.SimpleQueue[Any]) -> Iterator[None]:
        self._changes = changes
        for each in (pod("first"), pod("second"), pod(*self._ended)):
            changes.put(PodChange(each["metadata"]["name"], each))
        yield

    def silent_seconds(self) -> float:
        """Called in each round."""
        while self._later:
            name, code = self._later.pop()
            self._changes.put(PodChange(name, pod(name, code)))
        return 0.0

    def log(self, name: str, **_: object) -> Iterator[bytes]:
        return iter(())

    def delete_pod(self, name: str) -> None:
        self.deleted.append(name)
        self._changes.put(PodChange(name, pod(name, 143)))


@pytest.mark.parametrize(
    ("ends", "codes", "deleted"),
    [
        # The first one saves what both have trained.
        ([("second", 0), ("first", 0)], [0, 0], []),
        ([("second", 64)], [143, 64], ["first"]),
        # A killed pod is heard of later than the one that lost its connection to it.
        ([("first", 1), ("second", 137)], [1, 137], []),
    ],
)
def test_a_pod_that_fails_ends_the_others_once_the_cause_is_known(
    request_: Request, ends: list[tuple[str, int]], codes: list[int], deleted: list[str]
) -> None:
    cluster: Any = Pods(*ends)
    both = [pod("first"), pod("second")]
    attempt = PodAttempt(cluster, request_, KubernetesSettings(), 5, both, lambda event: None)
    endings = attempt.follow(cluster, lambda *_: None, lambda: None, threading.Event())
    assert [each.code for each in endings] == codes
    assert cluster.deleted == deleted


class Server:
    """A Prefect server with two flow runs; one that is cancelled ends as Cancelled."""

    def __init__(self, *shown: tuple[int, State[Any]]) -> None:
        self.runs = [FlowRun(flow_id=uuid4(), state=Scheduled()) for _ in range(2)]
        self.cancelled: list[int] = []
        self._updates: queue.SimpleQueue[FlowRun] = queue.SimpleQueue()
        for number, state in shown:
            self._show(number, state)

    @contextmanager
    def watched(self, *_: UUID) -> Iterator[queue.SimpleQueue[FlowRun]]:
        yield self._updates

    def read_work_pool(self, name: str) -> WorkPool:
        return WorkPool(name=name, type="process", concurrency_limit=2, default_queue_id=uuid4())

    def read_work_queue_by_name(self, name: str, **_: str) -> WorkQueue:
        return WorkQueue(name=name, concurrency_limit=1, work_pool_id=uuid4())

    def read_workers_for_work_pool(self, name: str) -> list[Worker]:
        return [
            Worker(name=name, status=status, work_pool_id=uuid4())
            for name, status in (("here", WorkerStatus.ONLINE), ("gone", WorkerStatus.OFFLINE))
        ]

    def read_flow_run(self, flow_run_id: UUID) -> FlowRun:
        return next(each for each in self.runs if each.id == flow_run_id)

    def set_flow_run_state(self, flow_run_id: UUID, state: State[Any]) -> None:
        number = [each.id for each in self.runs].index(flow_run_id)
        self.cancelled.append(number)
        self._show(number, Cancelled())

    def _show(self, number: int, state: State[Any]) -> None:
        changes = {"state": state, "state_type": state.type}
        self._updates.put(self.runs[number].model_copy(update=changes))


DEPLOYMENT = DeploymentResponse(
    name="gpu", flow_id=uuid4(), work_pool_name="geb", work_queue_name="gpu"
)


def gang_on(server: Any, request: Request, settings: WorkPoolSettings) -> Gang:
    return Gang(server, server.runs, DEPLOYMENT, request, settings, 0.0, lambda event: None)


@pytest.mark.parametrize(
    ("shown", "ended", "cancelled"),
    [
        # The first node saves what both have trained.
        ([(0, Running()), (1, Completed()), (0, Running()), (0, Completed())], [1, 0], []),
        ([(0, Running()), (1, Failed())], [1], [0]),
        # No worker has taken the second.
        ([(0, Failed())], [0], [1]),
    ],
)
def test_a_flow_run_that_fails_ends_the_others_and_one_that_completes_lets_the_first_save(
    request_: Request, shown: list[tuple[int, State[Any]]], ended: list[int], cancelled: list[int]
) -> None:
    server: Any = Server(*shown)
    gang = gang_on(server, request_, WorkPoolSettings())
    over = gang.wait(server, threading.Event(), threading.Event())
    assert [[run.id for run in server.runs].index(each.id) for each in over] == ended
    assert server.cancelled == cancelled


def test_nodes_give_way_when_no_worker_takes_another_one_and_the_pool_s_state_is_told(
    request_: Request,
) -> None:
    server: Any = Server((0, Running()), (1, Late()))
    gang = gang_on(server, request_, WorkPoolSettings(gang_wait_seconds=1e-9))
    with pytest.raises(StageFailedError) as caught:
        gang.wait(server, threading.Event(), threading.Event())
    said = str(caught.value)
    assert "no worker has taken node 2 of 2 in 1e-09 s (execution.work_pool.gang_wait_s" in said
    assert "work pool 'geb', queue 'gpu': workers online: here; limit of work pool 'geb': 2" in said
    assert server.cancelled == [0, 1]


def test_a_node_that_a_worker_has_taken_is_waited_for(request_: Request) -> None:
    server: Any = Server((0, Running()), (1, Pending()), (1, Running()), (0, Completed()))
    gang = gang_on(server, request_, WorkPoolSettings(gang_wait_seconds=1e-9))
    gang.wait(server, threading.Event(), threading.Event())
    assert server.cancelled == [1], "when the first one has ended"


def test_more_nodes_than_a_queue_ever_lets_run_are_a_mistake() -> None:
    server: Any = Server()
    why = too_few_places(server, DEPLOYMENT, 2)
    assert why is not None
    assert why[0] == "2 nodes are wanted, and the limit of queue 'gpu' is 1"
    assert "`prefect work-queue set-concurrency-limit --pool geb gpu 2`" in why[1]
    assert too_few_places(server, DEPLOYMENT, 1) is None
