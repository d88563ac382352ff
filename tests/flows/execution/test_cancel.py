"""Cancelling through Prefect's API: the stages end, the run ends Cancelled, nothing is left."""

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelling

from tests.flows.loop import stage_processes, started, steps, wait_for_line, write_config
from tests.flows.probes import gone
from tests.flows.standing.standing import ended

pytestmark = pytest.mark.slow


@pytest.fixture
def client(prefect_server):
    return SyncPrefectClient(prefect_server)


def running(client, name):
    """The one flow run of a name that is not over."""
    runs = [
        run
        for run in client.read_flow_runs()
        if run.name.startswith(name) and run.state is not None and not run.state.is_final()
    ]
    assert len(runs) == 1, runs
    return runs[0]


def test_cancelling_a_terminal_s_run_stops_its_stages(client, tmp_path):
    config = write_config(tmp_path, name="to-cancel")
    with started("run", config) as process:
        wait_for_line(process, "sft:", "steps")
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert stage_processes(process)
        run = running(client, "to-cancel")
        client.set_flow_run_state(run.id, Cancelling())
        output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "run to-cancel was cancelled" in output
    assert "geb resume to-cancel" in output
    assert "Traceback" not in output
    assert ended(client, run.id).state_name == "Cancelled"
    assert all(gone(pid) for pid in pids)
    records = steps(tmp_path / "store", "to-cancel")
    # The steps at work, whichever they are by then: on a slow machine none is done yet.
    assert "cancelled" in {step["state"] for step in records.values()} <= {"cancelled", "done"}
    assert " cancelled after " in output
    assert "iteration-1/train" not in records
