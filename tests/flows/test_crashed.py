"""Flow runs of killed processes, on a server that has no automation for them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import refresh_global_settings_context
from prefect.states import AwaitingRetry, Completed, Crashed, Pending, Running, State

from flows.execution.attempts import Attempt, attempts, recorded_attempt
from flows.execution.crashed import mark_crashed
from flows.execution.run_record import RunRecord
from flows.pipeline.loading import load_config
from stages.contract.local_store import LocalStore
from tests.flows.loop import geb, write_config
from tests.flows.prefect_server import Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncPrefectClient]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PREFECT_API_URL", server.api)
        refresh_global_settings_context()
        with SyncPrefectClient(server.api) as client:
            yield client
    refresh_global_settings_context()
    server.stop()


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    record = RunRecord(store, "small")
    record.save_config(load_config(write_config(tmp_path)))
    return record


@flow
def anything() -> None:
    """A flow to have runs of."""


def started(client: SyncPrefectClient, state: State | None = None) -> str:
    return str(client.create_flow_run(anything, state=state or Running()).id)


def tried(record: RunRecord, flow_run: str, host: str = "") -> None:
    """Writes down an attempt whose process is gone."""
    attempt = Attempt(
        id=flow_run,
        state="running",
        started=time.time(),
        host=host or socket.gethostname(),
        pid=1,
        flow_runs=(flow_run,),
    )
    folder = record.path / "attempts"
    folder.mkdir(exist_ok=True)
    (folder / f"{flow_run}.json").write_text(attempt.model_dump_json())


def state_of(client: SyncPrefectClient, flow_run: str) -> str:
    state = client.read_flow_run(UUID(flow_run)).state
    assert state is not None
    return state.name


@task
def step() -> None:
    """A task to have runs of."""


def working(client: SyncPrefectClient, flow_run: str, state: State) -> UUID:
    return client.create_task_run(
        step, UUID(flow_run), dynamic_key=f"{state.name}-{flow_run}", state=state
    ).id


def task_state(client: SyncPrefectClient, task_run: UUID) -> str:
    state = client.read_task_run(task_run).state
    assert state is not None
    return state.name


@pytest.mark.parametrize("marked", ["Running", "Crashed"], ids=["by nothing", "by the automation"])
def test_tasks_of_a_killed_flow_run_do_not_stay_running(
    client: SyncPrefectClient, record: RunRecord, marked: str
) -> None:
    killed = started(client, Running() if marked == "Running" else Crashed())
    other = started(client)
    before = [working(client, killed, state) for state in (Running(), Pending(), Completed())]
    elsewhere = working(client, other, Running())
    tried(record, killed)
    mark_crashed(record)
    found = [task_state(client, each) for each in (*before, elsewhere)]
    assert found == ["Crashed", "Crashed", "Completed", "Running"]


def test_tasks_that_a_retried_flow_run_left_are_ended_and_those_around_it_are_not(
    client: SyncPrefectClient, record: RunRecord
) -> None:
    again, outer = started(client), started(client)
    left, around = working(client, again, Running()), working(client, outer, Running())
    tried(record, again)
    mark_crashed(record, (again, outer))
    assert task_state(client, left) == "Crashed"
    assert task_state(client, around) == "Running"
    assert state_of(client, again) == "Running"


def test_the_next_attempt_tells_of_killed_ones_and_of_no_others(
    client: SyncPrefectClient, record: RunRecord
) -> None:
    killed, again, elsewhere = (started(client) for _ in range(3))
    waiting = started(client, AwaitingRetry())
    for each in (killed, again, waiting):
        tried(record, each)
    tried(record, elsewhere, host="another")
    with recorded_attempt(record, (again,)):
        mark_crashed(record, (again,))
    found = [state_of(client, each) for each in (killed, again, elsewhere, waiting)]
    assert found == ["Crashed", "Running", "Running", "AwaitingRetry"]
    told = {each.id: each.flow_runs for each in attempts(record)}
    assert told[killed] == ()
    assert told[elsewhere] == (elsewhere,)


def test_flow_runs_of_another_server_wait_for_it(
    client: SyncPrefectClient, record: RunRecord
) -> None:
    unknown = "00000000-0000-4000-8000-000000000000"
    tried(record, unknown)
    assert mark_crashed(record) == []
    [attempt] = attempts(record)
    assert attempt.flow_runs == (unknown,)


def test_the_doctor_tells_of_all_runs_of_a_store(
    client: SyncPrefectClient, record: RunRecord
) -> None:
    killed = started(client)
    tried(record, killed)
    assert os.environ["PREFECT_API_URL"]
    done = geb("doctor", "--reap", "--store", record.store.root, "--json")
    assert "of run small: Crashed" in done.stderr, done.stderr
    assert state_of(client, killed) == "Crashed"
