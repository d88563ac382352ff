"""Flow runs that start while an earlier one of their deployment is at work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Completed, Running

from tests.flows.loop import ROOT
from tests.flows.overlapping import Overlap, overlapping
from tests.flows.probes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(prefect_server) as client:
        yield client


@pytest.fixture
def deploy(client: SyncPrefectClient) -> Callable[[str], UUID]:
    """Makes a deployment of the flow under a name."""

    def make(name: str) -> UUID:
        flow = client.create_flow(overlapping)
        return client.create_deployment(
            flow, name, entrypoint="tests.flows.overlapping.overlapping"
        )

    return make


@pytest.fixture
def deployment(deploy: Callable[[str], UUID], request: pytest.FixtureRequest) -> UUID:
    return deploy(request.node.name)


@pytest.fixture
def earlier(client: SyncPrefectClient, deployment: UUID) -> Iterator[FlowRun]:
    """A run of the deployment that is at work elsewhere."""
    run = client.create_flow_run_from_deployment(deployment, name="nightly-1")
    client.set_flow_run_state(run.id, Running(), force=True)
    yield run
    client.set_flow_run_state(run.id, Completed(), force=True)


class Start:
    """A run of the deployment that starts now, in a process of its own as a worker starts it."""

    def __init__(self, client: SyncPrefectClient, deployment: UUID, overlap: Overlap) -> None:
        self._client = client
        self._run = client.create_flow_run_from_deployment(
            deployment, parameters={"overlap": overlap}
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "prefect.engine"],
            env=os.environ | {"PREFECT__FLOW_RUN_ID": str(self._run.id)},
            cwd=ROOT,
        )

    @property
    def is_at_work(self) -> bool:
        return self.state().type is StateType.RUNNING

    def state(self) -> State[Any]:
        """Its state now."""
        state = self._client.read_flow_run(self._run.id).state
        assert state is not None
        return state

    def end(self) -> State[Any]:
        """Its state when it is over."""
        self._process.wait()
        return self.state()

    def said(self) -> str:
        """Its log, when that has come to the server."""
        logs: list[str] = []
        # The server answers with no more than 200 lines, the oldest of all runs.
        of_this_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[self._run.id]))

        def come() -> bool:
            logs[:] = [each.message for each in self._client.read_logs(of_this_run)]
            return any("is still at work" in each for each in logs)

        wait_until(come)
        return "\n".join(logs)


def test_an_earlier_run_is_told_of_and_both_go_on(
    client: SyncPrefectClient, deployment: UUID, earlier: FlowRun
) -> None:
    start = Start(client, deployment, "go_on")
    assert start.end().type is StateType.COMPLETED
    assert "'nightly-1' of this deployment is still at work: this run goes on" in start.said()


def test_a_run_is_skipped_and_says_beside_which(
    client: SyncPrefectClient, deployment: UUID, earlier: FlowRun
) -> None:
    ended = Start(client, deployment, "skip").end()
    assert ended.type is StateType.CANCELLED
    assert ended.message == "skipped: 'nightly-1' of this deployment is still at work"


def test_a_run_waits_until_the_earlier_one_is_over(
    client: SyncPrefectClient, deployment: UUID, earlier: FlowRun
) -> None:
    start = Start(client, deployment, "wait")
    assert "this run waits for its end" in start.said()
    assert start.is_at_work
    client.set_flow_run_state(earlier.id, Completed(), force=True)
    assert start.end().type is StateType.COMPLETED


def test_the_earlier_run_is_cancelled_and_its_end_is_awaited(
    client: SyncPrefectClient, deployment: UUID, earlier: FlowRun
) -> None:
    start = Start(client, deployment, "cancel_earlier")
    wait_until(lambda: client.read_flow_run(earlier.id).state_type is StateType.CANCELLING)
    assert start.is_at_work, "its stages are still ending"
    client.set_flow_run_state(earlier.id, Cancelled(), force=True)
    assert start.end().type is StateType.COMPLETED


def test_of_a_later_run_and_of_another_deployment_nothing_is_asked(
    client: SyncPrefectClient, deployment: UUID, deploy: Callable[[str], UUID]
) -> None:
    beside = client.create_flow_run_from_deployment(deploy("another"), name="beside")
    client.set_flow_run_state(beside.id, Running(), force=True)
    assert Start(client, deployment, "skip").end().type is StateType.COMPLETED
    client.set_flow_run_state(beside.id, Completed(), force=True)
