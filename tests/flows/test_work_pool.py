"""Stages on the workers of work pools: where they land, what comes back, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

from flows.pipeline.placement import Execution, WorkPoolSettings
from stages.contract.local_store import LocalStore
from stages.contract.request import Resources
from tests.flows.cluster import deploy_probes, deploy_stage, make_pool, start_probes, worker
from tests.flows.probe_flow import ProbeConfig, ProbeResources
from tests.flows.probes import hanging_pids, wait_until, write_probes
from tests.flows.test_process_runner import alive, gone
from tests.probe_stage import ProbeParams, install

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(prefect_server: str) -> SyncPrefectClient:
    client = SyncPrefectClient(prefect_server)
    for name in ("cpu", "gpu"):
        make_pool(client, f"pool-{name}", name)
    return client


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store, and the probe where stages and workers find it."""
    install(tmp_path / "code", monkeypatch)
    monkeypatch.setenv("GEB_GPUS", "0")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))
    LocalStore.open(str(tmp_path / "store"), create=True)
    return tmp_path


def config(place: Path, *probes: ProbeParams, gpus: int = 0, **execution: object) -> ProbeConfig:
    """Probes on the two pools, without retries unless asked for."""
    settings = {
        "runner": "work_pool",
        "parallel": 4,
        "retries": 0,
        "retry_delay_seconds": 0,
        "grace_seconds": 5,
        "work_pool": WorkPoolSettings(poll_seconds=0.5),
    }
    return ProbeConfig(
        name=place.name,
        store=str(place / "store"),
        probes=probes,
        resources=ProbeResources(probe=Resources(gpus=gpus)),
        execution=Execution.model_validate(settings | execution),
    )


@contextmanager
def orchestrator(place: Path, config: ProbeConfig) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.flows.probe_flow", str(write_probes(place, config))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run_to_end(place: Path, config: ProbeConfig) -> str:
    with orchestrator(place, config) as process:
        return process.communicate()[0]


def runs_of(client: SyncPrefectClient, config: ProbeConfig) -> tuple[list[FlowRun], list[FlowRun]]:
    """The flow runs that orchestrated, and those of the stages."""
    found = [run for run in client.read_flow_runs() if config.name in (run.name, *_runs(run))]
    whole = [run for run in found if run.parent_task_run_id is None]
    return whole, [run for run in found if run.parent_task_run_id is not None]


def _runs(run: FlowRun) -> list[str]:
    return [tag.removeprefix("run:") for tag in run.tags]


def states(runs: list[FlowRun]) -> list[str]:
    return [str(run.state_name) for run in runs]


def test_stages_land_on_the_workers_that_their_resources_ask_for_and_failures_come_back(
    client: SyncPrefectClient, place: Path
) -> None:
    on_cpu = config(
        place,
        ProbeParams(behaviour="tell_place"),
        ProbeParams(behaviour="refuse"),
        ProbeParams(behaviour="crash"),
        retries=1,
    )
    on_gpu = config(place, ProbeParams(behaviour="tell_place", message="on a GPU"), gpus=1)
    with ExitStack() as stack:
        for name in ("cpu", "gpu"):
            deploy_stage(client, name, f"pool-{name}", name)
            stack.enter_context(worker(client, place, f"pool-{name}", name, f"worker-{name}"))
        said = run_to_end(place, on_cpu)
        run_to_end(place, on_gpu)
    whole, stages = runs_of(client, on_cpu)
    assert sorted(states(whole)) == ["Completed", "Failed"]
    # The crash was tried twice; what a person must mend was not.
    assert sorted(states(stages)) == ["Completed", "Completed", "Failed", "Failed", "Refused"]
    logs = "".join(each.read_text() for each in (place / "store/logs").rglob("*.log"))
    assert "worker worker-cpu, GPUs ''" in logs
    assert "worker worker-gpu, GPUs '0'" in logs
    assert "UserError: probe/1" in said
    assert "remedy: use 8" in said
    assert "RuntimeError: boom" in said
    assert "Traceback (most recent call last)" in said.split("the stage's last lines")[1]


def test_a_killed_orchestrator_comes_back_to_its_stage_and_cancelling_ends_both(
    client: SyncPrefectClient, place: Path
) -> None:
    hanging = config(place, ProbeParams(behaviour="leave_child"))
    deploy_stage(client, "cpu", "pool-cpu", "cpu")
    with worker(client, place, "pool-cpu", "cpu", "worker-lasting"):
        with orchestrator(place, hanging) as process:
            pids = hanging_pids(place / "store")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert all(alive(pid) for pid in pids), "a stage on a worker outlives its orchestrator"
        [killed], _ = runs_of(client, hanging)
        with orchestrator(place, hanging) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if "goes on waiting for flow run" in line)
            [second] = [run for run in runs_of(client, hanging)[0] if run.id != killed.id]
            client.set_flow_run_state(second.id, Cancelling())
            process.communicate()
        assert all(gone(pid) for pid in pids)
        assert states(runs_of(client, hanging)[1]) == ["Cancelled"]
        assert client.read_flow_run(second.id).state_name == "Cancelled"


def test_a_drained_worker_s_stage_goes_on_on_another_worker(
    client: SyncPrefectClient, place: Path
) -> None:
    once = config(place, ProbeParams(behaviour="hang_once"), retries=1)
    deploy_stage(client, "cpu", "pool-cpu", "cpu")
    with (
        worker(client, place, "pool-cpu", "cpu", "worker-drained") as drained,
        orchestrator(place, once) as process,
    ):
        pids = hanging_pids(place / "store")
        drained.send_signal(signal.SIGTERM)
        assert all(gone(pid) for pid in pids)
        assert drained.wait() == 0
        with worker(client, place, "pool-cpu", "cpu", "worker-next"):
            said = process.communicate()[0]
    whole, stages = runs_of(client, once)
    assert states(whole) == ["Completed"], said
    assert sorted(states(stages)) == ["Completed", "Crashed"]
    [_] = LocalStore.open(once.store).artifacts()


def test_a_run_on_a_drained_worker_does_not_stay_running(
    client: SyncPrefectClient, place: Path
) -> None:
    hanging = config(place, ProbeParams(behaviour="leave_child"), runner="process")
    deploy_probes(client, "pool-cpu", "cpu")
    with worker(client, place, "pool-cpu", "cpu", "worker-of-runs") as drained:
        run = start_probes(client, hanging)
        pids = hanging_pids(place / "store")
        drained.send_signal(signal.SIGTERM)
        drained.wait()
        assert all(gone(pid) for pid in pids)
    assert client.read_flow_run(run.id).state_name == "Crashed"


def test_cancelling_a_run_on_a_worker_ends_its_stages(
    client: SyncPrefectClient, place: Path
) -> None:
    hanging = config(place, ProbeParams(behaviour="leave_child"), runner="process")
    deploy_probes(client, "pool-cpu", "cpu")
    with worker(client, place, "pool-cpu", "cpu", "worker-cancelled"):
        run = start_probes(client, hanging)
        pids = hanging_pids(place / "store")
        client.set_flow_run_state(run.id, Cancelling())
        assert all(gone(pid) for pid in pids)
        wait_until(lambda: client.read_flow_run(run.id).state_name == "Cancelled")


def test_a_queue_that_nobody_polls_is_named_with_the_remedy(
    client: SyncPrefectClient, place: Path
) -> None:
    make_pool(client, "pool-empty", "lonely")
    deploy_stage(client, "lonely", "pool-empty", "lonely")
    settings = WorkPoolSettings(
        cpu_deployment="stage/lonely", poll_seconds=0.5, worker_wait_seconds=1
    )
    waiting = config(place, ProbeParams(), retries=1, work_pool=settings)
    said = run_to_end(place, waiting)
    assert "no worker polls queue 'lonely' of work pool 'pool-empty'" in said
    assert "geb worker pool-empty --queue lonely" in said
    assert states(runs_of(client, waiting)[1]) == ["Cancelled"], "it was left in the queue"


def test_a_deployment_that_is_not_there_is_named(client: SyncPrefectClient, place: Path) -> None:
    settings = WorkPoolSettings(cpu_deployment="stage/nowhere")
    said = run_to_end(place, config(place, ProbeParams(), work_pool=settings))
    assert "execution.work_pool.cpu_deployment: Prefect has no deployment 'stage/nowhere'" in said
    assert "prefect deploy --all" in said
