"""A Prefect server behind basic authentication: runs that know the password, and that do not."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.context import refresh_global_settings_context
from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

from flows.pipeline.placement import Execution, WorkPoolSettings
from flows.runners.local.process import ProcessRunner
from flows.standing.server import ensure_prefect_server
from stages.contract.errors import GebError, UserError
from stages.contract.events import Log
from stages.contract.local_store import LocalStore
from stages.contract.request import make_request
from tests.flows.cluster import deploy_stage, make_pool, worker
from tests.flows.loop import geb
from tests.flows.prefect_server import Server
from tests.flows.probe_flow import ProbeConfig
from tests.flows.probes import write_probes
from tests.probe_stage import ProbeParams, install

PASSWORD = "admin:correct horse"
EXPECTED = f"Basic {base64.b64encode(PASSWORD.encode()).decode()}"


class _Guarded(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        knows = self.headers.get("Authorization") == EXPECTED
        self.send_response(200 if knows else 401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A guarded server that this process is told to use."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Guarded)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{server.server_port}/api")
    yield monkeypatch
    server.shutdown()
    thread.join()
    server.server_close()
    monkeypatch.undo()
    refresh_global_settings_context()


@pytest.mark.parametrize("password", [None, "admin:wrong", "admin"])
def test_who_does_not_know_the_password_is_told_what_to_set(
    guarded: pytest.MonkeyPatch, tmp_path: Path, password: str | None
) -> None:
    if password is not None:
        guarded.setenv("PREFECT_API_AUTH_STRING", password)
    refresh_global_settings_context()
    with pytest.raises(UserError, match="does not let us in: 401") as caught:
        ensure_prefect_server(tmp_path / "log", print)
    assert "PREFECT_API_AUTH_STRING" in caught.value.remedy
    assert "wrong" not in str(caught.value)


def test_who_knows_the_password_is_let_in(guarded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    guarded.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
    refresh_global_settings_context()
    assert ensure_prefect_server(tmp_path / "log", print) is None


def test_a_server_that_does_not_answer_is_named(
    guarded: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    guarded.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    refresh_global_settings_context()
    with pytest.raises(GebError, match=r"no Prefect server answers at http://127\.0\.0\.1:9/api"):
        ensure_prefect_server(tmp_path / "log", print)


@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_API_AUTH_STRING",
        "PREFECT_SERVER_API_AUTH_STRING",
        "PREFECT_API_KEY",
        "GEB_DATABASE",
    ],
)
def test_no_stage_gets_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(tmp_path / "code", monkeypatch)
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    monkeypatch.setenv(name, PASSWORD)
    request = make_request(
        ProbeParams(behaviour="tell_environment", message=name),
        inputs={},
        seed=0,
        store=str(store.root),
    )
    heard: list[object] = []
    ProcessRunner().run(request, heard.append)
    assert f"{name} is None" in [each.message for each in heard if isinstance(each, Log)]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server behind a password."""
    server = Server(tmp_path_factory.mktemp("locked"), PREFECT_SERVER_API_AUTH_STRING=PASSWORD)
    server.start()
    yield server
    server.stop()


def ask_server(server: Server, what: str) -> str:
    """An answer of the server's API to one who knows the password."""
    asked = urllib.request.Request(
        f"{server.api}/{what}",
        data=b"{}",
        headers={"Content-Type": "application/json", "Authorization": EXPECTED},
    )
    with urllib.request.urlopen(asked) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.slow
def test_a_run_reports_to_a_server_behind_a_password(finished: Path, locked: Server) -> None:
    ask = ("resume", "small", "--store", finished.parent / "store")
    refused = geb(*ask, PREFECT_API_URL=locked.api)
    assert refused.returncode == 64, refused.stderr
    assert "does not let us in" in refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr
    before = {each["id"] for each in json.loads(ask_server(locked, "flow_runs/filter"))}
    done = geb(*ask, PREFECT_API_URL=locked.api, PREFECT_API_AUTH_STRING=PASSWORD)
    assert done.returncode == 0, done.stderr
    found = json.loads(ask_server(locked, "flow_runs/filter"))
    assert [each["state_type"] for each in found if each["id"] not in before] == ["COMPLETED"]


@pytest.mark.slow
def test_stages_on_a_worker_work_behind_a_password_and_nothing_keeps_it(
    locked: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orchestrator and worker know it; the stage, its artifact, logs and flow runs do not."""
    install(tmp_path / "code", monkeypatch)
    name = "PREFECT_API_AUTH_STRING"
    monkeypatch.setenv("PREFECT_API_URL", locked.api)
    monkeypatch.setenv(name, PASSWORD)
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    config = ProbeConfig(
        name="locked",
        store=str(store.root),
        probes=(ProbeParams(behaviour="tell_environment", message=name),),
        execution=Execution(
            runner="work_pool", retries=0, work_pool=WorkPoolSettings(poll_seconds=0.5)
        ),
    )
    with (
        SyncPrefectClient(locked.api, auth_string=PASSWORD) as client,
        temporary_settings({PREFECT_API_AUTH_STRING: PASSWORD}),
    ):
        make_pool(client, "locked", "cpu")
        deploy_stage(client, "cpu", "locked", "cpu")
        with worker(client, tmp_path, "locked", "cpu", "worker-locked"):
            done = subprocess.run(
                [sys.executable, "-m", "tests.flows.probe_flow", write_probes(tmp_path, config)],
                capture_output=True,
                text=True,
                check=False,
            )
    assert done.returncode == 0, done.stdout + done.stderr
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(f"{name} is None".encode() in content for content in kept.values())
    assert [path for path, content in kept.items() if b"correct horse" in content] == []
    said = ask_server(locked, "flow_runs/filter") + ask_server(locked, "logs/filter")
    assert "correct horse" not in said + done.stdout + done.stderr
