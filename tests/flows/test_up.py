"""`geb up`: found when it is there, gone when it is ended, and every way to go on with a run."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.client.schemas.sorting import FlowRunSort

from flows.standing.server import is_prefect
from tests.flows.loop import ROOT, geb, started, wait_for_line, warm_started, write_config
from tests.flows.standing import SMALL_OVERRIDES, Up, failing_once, geb_up, unconfigured

NOWHERE = {"oracle_code": "/nowhere/oracle.py"}
DONE = ("Completed", "Cached")

pytestmark = pytest.mark.slow


@dataclass
class Webhook:
    """A web server on loopback that keeps what it is told."""

    address: str
    messages: queue.Queue[str]


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """Takes ``{"text": …}`` by POST, as chat services do."""
    messages: queue.Queue[str] = queue.Queue()

    class Keep(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            messages.put(json.loads(body)["text"])
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Keep) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Webhook(f"http://127.0.0.1:{server.server_port}/hook", messages)
        server.shutdown()


def wait_until_gone(pids: list[int]) -> None:
    """Returns when processes that are not our children have ended; the time limit bounds it."""
    for pid in pids:
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], check=True)


def wait_until_running(up: Up, run: UUID) -> None:
    """Returns when a run has started a stage."""
    while "Running" not in up.steps(run).values():
        time.sleep(0.5)


def below(process: subprocess.Popen[str]) -> list[int]:
    """Everything that a process has started."""
    return [each.pid for each in psutil.Process(process.pid).children(recursive=True)]


def test_up_is_found_by_a_second_one_and_by_geb_run_and_ended_from_outside(tmp_path: Path) -> None:
    with geb_up(tmp_path) as (process, up):
        again = geb("up", "--home", up.home, "--store", up.store)
        assert again.returncode == 0, again.stderr
        assert "running already" in again.stdout
        assert up.ui in again.stdout
        other = geb("up", "--home", up.home, "--store", tmp_path / "other")
        assert other.returncode == 64
        assert str(up.store) in other.stderr
        config = SMALL_OVERRIDES | {"name": "ended", "store": str(up.store)}
        run = up.start("iterate/iterate", config=config)
        wait_until_running(up, run.id)
        processes = below(process)
        done = geb("down", "--home", up.home)
        assert done.returncode == 0, done.stderr
        assert process.wait() == 0
        wait_until_gone(processes)
        assert not is_prefect(up.api)
        assert "nothing" in geb("down", "--home", up.home).stdout
    with geb_up(tmp_path) as (_, up), up.client() as client:
        ended = client.read_flow_run(run.id)
        assert ended.state is not None
        assert ended.state.is_crashed(), "the history stays, and nothing seems to run"


def test_geb_run_says_where_a_geb_up_is(standing: Up, finished: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "run", str(finished)],
        capture_output=True,
        text=True,
        env=unconfigured() | {"GEB_HOME": str(standing.home)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"PREFECT_API_URL={standing.api}" in done.stdout


def test_a_message_is_sent_when_a_run_has_ended(standing: Up, webhook: Webhook) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", "automations"],
        capture_output=True,
        text=True,
        env=os.environ | {"PREFECT_API_URL": standing.api, "GEB_NOTIFY_URL": webhook.address},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    standing.start("iterate/iterate", config={"name": "told", "iterations": 1, "inputs": NOWHERE})
    told = webhook.messages.get()
    assert "told" in told
    assert "Failed" in told
    assert "/nowhere/oracle.py" in told
    assert "/runs/flow-run/" in told


def test_a_killed_up_leaves_nothing_behind(tmp_path: Path) -> None:
    with geb_up(tmp_path) as (process, up):
        processes = below(process)
        process.kill()
        process.wait()
        done = geb("down", "--home", up.home)
        assert done.returncode == 0, done.stderr
        wait_until_gone(processes)
        assert not is_prefect(up.api)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "flows.commands.cli",
                "up",
                "--port",
                port,
                "--home",
                str(tmp_path / "home"),
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=unconfigured() | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert done.returncode == 64, done.stdout
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr


def resume(up: Up, run: FlowRun) -> UUID | None:
    """`geb resume`, on a server of its own."""
    done = geb("resume", "again", "--store", up.store)
    assert done.returncode == 0, done.stderr
    return None


def retry(up: Up, run: FlowRun) -> UUID | None:
    """`prefect flow-run retry`."""
    done = up.prefect("flow-run", "retry", str(run.id))
    assert done.returncode == 0, done.stderr
    return run.id


def start_anew(up: Up, run: FlowRun) -> UUID | None:
    """A new run with the same parameters."""
    return up.start("iterate/iterate", **run.parameters).id


@pytest.mark.parametrize("go_on", [retry, resume, start_anew])
def test_every_way_to_go_on_finds_what_is_done(
    standing: Up,
    finished: Path,
    tmp_path: Path,
    go_on: Callable[[Up, FlowRun], UUID | None],
) -> None:
    inputs = warm_started(finished) | {"oracle_code": str(failing_once(tmp_path))}
    config = SMALL_OVERRIDES | {"name": "again", "inputs": inputs, "store": str(standing.store)}
    run = standing.wait(standing.start("iterate/iterate", preset="quickstart", config=config).id)
    assert run.state is not None
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
        shown = json.loads(geb("status", "again", "--store", standing.store, "--json").stdout)
        states = {each["step"]: each["state"] for each in shown["again"]["steps"]}
        assert {states[name] for name in done} == {"reused"}
        assert states[failed] == "done"
        return
    again = standing.wait(ended)
    assert again.state is not None
    assert again.state.is_completed(), again.state.message
    states = standing.steps(ended)
    assert {states[name] for name in done} == {"Cached"}
    assert states[failed] == "Completed"


def test_a_schedule_starts_a_run(standing: Up) -> None:
    every = {"landscape": {"num_arms": 20, "reference_arm": 5, "best_arm": 15}, "num_seeds": 1}
    small = {"num_iterations": 5, "methods": ["none"], "record_every": 5, "kappas": [1.0]}
    schedule = DeploymentScheduleCreate(
        schedule=IntervalSchedule(
            interval=timedelta(seconds=30), anchor_date=datetime.now(UTC) + timedelta(seconds=10)
        ),
        active=True,
        parameters={
            "config": {
                "name": "scheduled",
                "store": str(standing.store),
                "bandit": every | small,
            }
        },
    )
    with standing.client() as client:
        deployment = client.read_deployment_by_name("bandit/bandit")
        [made] = client.create_deployment_schedules(deployment.id, [schedule])
        due = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
        # A service of the server looks for new schedules every few seconds.
        while not (
            runs := client.read_flow_runs(
                flow_run_filter=due, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=1
            )
        ):
            time.sleep(0.5)
        assert runs[0].auto_scheduled
        ended = standing.wait(runs[0].id)
        client.delete_deployment_schedule(deployment.id, made.id)
    assert ended.state is not None
    assert ended.state.is_completed(), ended.state.message
    assert ended.name == "scheduled"


def test_a_run_that_was_killed_does_not_stay_running(
    standing: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", standing.api)
    with started("run", write_config(tmp_path, name="killed")) as process:
        wait_for_line(process, "sft:", "started")
        with standing.client() as client:
            mine = FlowRunFilter(tags=FlowRunFilterTags(all_=["run:killed"]))
            [run] = client.read_flow_runs(flow_run_filter=mine)
        process.kill()
    ended = standing.wait(run.id)
    assert ended.state is not None
    assert ended.state.is_crashed()
    assert "no heartbeat" in str(ended.state.message)


def test_a_wrong_value_ends_the_run_before_any_stage(standing: Up) -> None:
    config = {"name": "wrong", "inputs": NOWHERE}
    run = standing.wait(standing.start("iterate/iterate", config=config).id)
    assert run.state is not None
    assert run.state.is_failed()
    assert "/nowhere/oracle.py" in str(run.state.message)
    assert standing.steps(run.id) == {}
