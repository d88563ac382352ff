"""Slots of a Prefect limit around the launch of stages with GPUs, against a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.context import refresh_global_settings_context

from flows.execution.step_executor import StepExecutor
from flows.pipeline.placement import Execution
from flows.pipeline.step import Step
from flows.runners.base import Runner
from flows.runners.choose import make_runner
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Event, Log
from stages.contract.request import Resources
from stages.store.base import Store
from tests.at_work import AtWork, at_work
from tests.flows.prefect_server import Server
from tests.flows.probe_flow import ProbeConfig, ProbeResources
from tests.flows.probes import gone, wait_until
from tests.orchestrators import orchestrator
from tests.probe_requests import probe_request
from tests.probe_stage import ProbeParams

pytestmark = pytest.mark.slow

LIMIT = "gpu"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps who holds slots on disk, as `geb up` starts it, and looks often."""
    server = Server(
        tmp_path_factory.mktemp("server"),
        PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=(
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
        PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS="1",
    )
    server.start()
    with SyncPrefectClient(server.api) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=LIMIT, limit=2))
    yield server
    server.stop()


@pytest.fixture
def store(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe_stage: None
) -> Iterator[Store]:
    # The host has more than the limit allows: what is tested is the limit.
    monkeypatch.setenv("GEB_GPUS", "0,1,2,3")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))
    with monkeypatch.context() as patched:
        patched.setenv("PREFECT_API_URL", server.api)
        # Prefect's own threads take their settings from here.
        refresh_global_settings_context()
        yield Store.open(str(tmp_path / "store"), create=True)
    refresh_global_settings_context()


def taken(server: Server) -> int:
    with SyncPrefectClient(server.api) as client:
        return client.read_global_concurrency_limit_by_name(LIMIT).active_slots


def runner() -> Runner:
    return make_runner(Execution(grace_seconds=1))


def waits(event: Event) -> bool:
    return isinstance(event, Log) and "slots of limit 'gpu'" in event.message


def test_a_stage_waits_for_slots_that_others_hold_and_a_cached_one_does_not(
    server: Server, store: Store
) -> None:
    config = ProbeConfig(store=str(store.root), resources=ProbeResources(probe=Resources(gpus=2)))
    step = Step("probe", ProbeParams(message="cached"), {})
    executor = StepExecutor(config)
    assert not executor.execute(step, {}).reused
    assert taken(server) == 0
    waiting = probe_request(store, Resources(gpus=1), message="waits")
    with at_work(probe_request(store, Resources(gpus=2), behaviour="hang"), runner()):
        assert taken(server) == 2
        waiter = AtWork(waiting, runner(), waits)
        waiter.wait()
        # While both slots are held:
        assert executor.execute(step, {}).reused
        assert store.load("probe", waiting.key) is None
    assert waiter.join() is None
    assert store.load("probe", waiting.key) is not None
    assert taken(server) == 0


def test_a_wait_for_slots_can_be_ended(server: Server, store: Store) -> None:
    with at_work(probe_request(store, Resources(gpus=2), behaviour="hang"), runner()):
        with at_work(probe_request(store, Resources(gpus=1)), runner(), waits) as waiter:
            pass
        assert isinstance(waiter.error, StoppedError)
    assert taken(server) == 0


def test_more_than_the_limit_allows_is_refused_with_the_numbers(store: Store) -> None:
    with pytest.raises(UserError, match="asks for 3 GPUs, the limit 'gpu' has 2"):
        make_runner(Execution()).run(probe_request(store, Resources(gpus=3)), lambda event: None)


def test_the_slots_of_a_killed_holder_are_freed_and_those_of_a_living_one_outlast_the_server(
    server: Server, store: Store
) -> None:
    request = probe_request(store, Resources(gpus=2), behaviour="ignore_sigterm")
    with orchestrator(request, Execution(grace_seconds=1)) as (holder, pids):
        server.stop()
        server.start()
        assert taken(server) == 2, "the restart freed slots that are in use"
        assert holder.poll() is None
    assert all(gone(pid) for pid in pids)
    wait_until(lambda: taken(server) == 0)
