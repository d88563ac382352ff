"""`geb up`: found when it is there, gone when it is ended, and ways to go on with a run."""

import re
import socket

import psutil
import pytest
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterName,
)
from prefect.client.schemas.sorting import FlowRunSort

from flows.standing.server import is_prefect
from tests.flows.loop import (
    geb,
    geb_json,
    geb_ok,
    geb_refused,
    started,
    wait_for_line,
    warm_started,
    write_config,
)
from tests.flows.probes import gone, wait_until
from tests.flows.standing.standing import SMALL_OVERRIDES, failing_once, geb_up

DONE = ("Completed", "Cached")

pytestmark = [pytest.mark.slow, pytest.mark.release]


def below(process):
    """Everything that a process has started."""
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def test_up_is_found_by_other_commands_and_ended_by_stop(tmp_path):
    with geb_up(tmp_path) as (process, up):
        again = geb_ok("up", "--home", up.home, "--store", up.store)
        assert "running already" in again.stdout
        assert up.ui in again.stdout
        assert str(up.store) in geb_refused("up", "--home", up.home, "--store", tmp_path / "other")
        config = SMALL_OVERRIDES | {"name": "ended", "store": str(up.store)}
        run = up.start("iterate/iterate", config=config)
        wait_until(lambda: "Running" in up.steps(run.id).values())
        processes = below(process)
        geb_ok("up", "--stop", "--home", up.home)
        assert process.wait() == 0
        assert all(gone(pid) for pid in processes)
        assert not is_prefect(up.api)
        assert "nothing" in geb("up", "--stop", "--home", up.home).stdout
    with geb_up(tmp_path) as (_, up), up.client() as client:
        ended = client.read_flow_run(run.id)
        assert ended.state_name == "Crashed", "the history stays, and nothing seems to run"


def test_a_killed_up_leaves_nothing_behind(tmp_path):
    with geb_up(tmp_path) as (process, up):
        processes = below(process)
        process.kill()
        process.wait()
        geb_ok("up", "--stop", "--home", up.home)
        assert all(gone(pid) for pid in processes)
        assert not is_prefect(up.api)


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        where = ("--home", tmp_path / "home", "--store", tmp_path / "store")
        refusal = geb_refused("up", "--port", port, *where, PREFECT_API_URL="")
    assert f"port {port}" in refusal
    assert "--port" in refusal


def resume(up, run):
    """`geb resume`, on another server."""
    geb_ok("resume", "again", "--store", up.store)


def start_anew(up, run):
    """A new run with the same parameters."""
    return up.start("iterate/iterate", **run.parameters).id


# Retry of the UI is in test_browser.
@pytest.mark.parametrize("go_on", [resume, start_anew])
def test_a_run_that_goes_on_finds_what_is_done(standing, finished, tmp_path, go_on):
    inputs = warm_started(finished) | {"oracle_code": str(failing_once(tmp_path))}
    config = SMALL_OVERRIDES | {"name": "again", "inputs": inputs, "store": str(standing.store)}
    run = standing.wait(standing.start("iterate/iterate", preset="quickstart", config=config).id)
    assert run.state.is_failed()
    message = str(run.state.message)
    assert "no route to the reward server" in message
    assert f"geb resume again --store {standing.store}" in message
    before = standing.steps(run.id)
    done = {name for name, state in before.items() if state in DONE}
    # Whichever called the oracle first.
    [failed] = [name for name, state in before.items() if state == "Failed"]
    assert {"prepare", "iteration-1/generate/0"} <= done
    ended = go_on(standing, run)
    if ended is None:
        shown = geb_json("status", "again", "--store", standing.store)
        states = {step["step"]: step["state"] for step in shown["again"]["steps"]}
        assert {states[name] for name in done} == {"reused"}
        assert states[failed] == "done"
        return
    again = standing.wait(ended)
    assert again.state_name == "Completed", again.state
    states = standing.steps(ended)
    assert {states[name] for name in done} == {"Cached"}
    assert states[failed] == "Completed"


def test_a_schedule_from_the_terminal_starts_a_fresh_run(standing, tmp_path, monkeypatch):
    monkeypatch.setenv("GEB_HOME", str(standing.home))
    monkeypatch.setenv("PREFECT_API_URL", "")
    config = write_config(tmp_path, name="scheduled")
    geb_ok("schedule", config, "--cron", "* * * * *", "--store", standing.store)
    with standing.client() as client:
        deployment = client.read_deployment_by_name("iterate/iterate")
        due = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))

        def scheduled():
            runs = client.read_flow_runs(
                flow_run_filter=due, sort=FlowRunSort.EXPECTED_START_TIME_ASC
            )
            return [run for run in runs if run.auto_scheduled]

        # A service of the server looks for new schedules every few seconds.
        wait_until(scheduled)
        ended = standing.wait(scheduled()[0].id)
        [schedule] = client.read_deployment_schedules(deployment.id)
        client.delete_deployment_schedule(deployment.id, schedule.id)
    assert ended.state_name == "Completed", ended.state
    assert re.fullmatch(r"scheduled-\d{8}-\d{6}", ended.name)


def test_a_run_that_was_killed_does_not_stay_running(standing, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", standing.api)
    with started("run", write_config(tmp_path, name="killed")) as process:
        wait_for_line(process, "sft:", "started")
        with standing.client() as client:
            mine = FlowRunFilter(name=FlowRunFilterName(any_=["killed"]))
            [run] = client.read_flow_runs(flow_run_filter=mine)
        process.kill()
    ended = standing.wait(run.id)
    assert ended.state.is_crashed()
    assert "no heartbeat" in str(ended.state.message)
