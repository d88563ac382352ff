"""Containers whose orchestrator died: ended, taken over or removed; an engine that is restarted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import docker
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed

from flows.execution.hooks import remove_containers
from flows.pipeline.placement import Execution
from flows.runners.docker.container import reap
from flows.runners.docker.runner import DockerRunner
from stages.contract.local_store import LocalStore
from tests.at_work import at_work
from tests.docker.containers import (
    PROBE_IMAGE,
    container_of,
    left_of,
    logs_of,
    run,
    settings,
)
from tests.flows.loop import geb
from tests.flows.probe_flow import ProbeConfig, probes
from tests.flows.probes import hanging_pids, wait_until, write_probes
from tests.lacking import lacking
from tests.probe_requests import probe_request
from tests.probe_stage import ProbeParams

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ORCHESTRATOR = """
import sys
from pathlib import Path
from flows.pipeline.placement import DockerSettings
from flows.runners.docker.runner import DockerRunner
from stages.contract.request import Request
settings = DockerSettings.model_validate_json(sys.argv[2])
hear = lambda event: print(event.model_dump_json(), flush=True)
DockerRunner(settings, grace_seconds=1).run(Request.read(Path(sys.argv[1])), hear)
"""


@contextlib.contextmanager
def orchestrator(
    store: LocalStore, death: str, **params: object
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a probe which hangs."""
    path = store.root.parent / "request.json"
    probe_request(store, **params).write(path)
    chosen = settings(on_orchestrator_death=death).model_dump_json()
    process = subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, str(path), chosen], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert any("pids " in line for line in process.stdout)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_with_stop_a_container_ends_with_its_orchestrator(
    store: LocalStore, engine: docker.DockerClient
) -> None:
    request = probe_request(store, behaviour="leave_child")
    with orchestrator(store, "stop", behaviour="leave_child") as process:
        container = container_of(engine, request)["Id"]
        assert reap(keep_running=False) == []
        process.send_signal(signal.SIGKILL)
        process.wait()
        engine.api.wait(container)
    assert left_of(engine, store) != []
    # Making a runner, which every flow does first, removes it.
    DockerRunner(settings())
    assert left_of(engine, store) == []
    assert "asked to stop" in logs_of(store, request)


def test_with_keep_the_next_attempt_takes_the_container_over(
    store: LocalStore, engine: docker.DockerClient
) -> None:
    request = probe_request(store, behaviour="hang")
    runner = DockerRunner(settings(on_orchestrator_death="keep"), grace_seconds=1)
    with orchestrator(store, "keep", behaviour="hang") as process:
        container = container_of(engine, request)["Id"]
        assert not runner.has_running(request), "its orchestrator lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert runner.has_running(request)
        assert reap(keep_running=True) == []
        # Its log is read from the beginning: what it said before tells that it hangs.
        with at_work(request, runner) as work:
            assert container_of(engine, request)["Id"] == container
            assert any("taking over" in each.model_dump_json() for each in work.heard)
            assert not DockerRunner(settings()).has_running(request), "it has an orchestrator again"
            assert "pids " in logs_of(store, request)


def test_doctor_removes_what_was_to_outlive_its_orchestrator(
    store: LocalStore, engine: docker.DockerClient
) -> None:
    with orchestrator(store, "keep", behaviour="hang") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    [name] = left_of(engine, store)
    done = geb("doctor", "--reap", "--store", store.root)
    assert f"removed container {name}" in done.stdout
    assert left_of(engine, store) == []


def test_the_hook_of_a_flow_run_that_was_killed_removes_its_containers(
    store: LocalStore, engine: docker.DockerClient
) -> None:
    with orchestrator(store, "stop", behaviour="ignore_sigterm") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = FlowRun(flow_id=uuid4(), parameters={"config": {"execution": {"runner": "process"}}})
    remove_containers(probes, run, Crashed())
    assert left_of(engine, store) != []
    run.parameters = {"config": {"execution": {"runner": "docker"}}}
    remove_containers(probes, run, Crashed())
    assert left_of(engine, store) == []


def test_containers_of_a_store_that_is_not_here_are_left_alone(
    store: LocalStore, engine: docker.DockerClient
) -> None:
    with orchestrator(store, "keep", behaviour="hang") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    elsewhere = store.root.rename(store.root.with_name("elsewhere"))
    assert reap(keep_running=False) == []
    assert left_of(engine, store) != []
    elsewhere.rename(store.root)
    assert len(reap(keep_running=False)) == 1


class Engine:
    """A Docker engine of its own, that a test may restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"unix://{folder}/sock"

    def start(self) -> None:
        folder = self._folder
        with (folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [
                    # Without a network of its own it would take the other engine's bridge down.
                    *("unshare", "--net"),
                    *("dockerd", "--data-root", folder / "data", "--exec-root", folder / "exec"),
                    *("--pidfile", folder / "pid", "--host", self.address),
                    *("--bridge", "none", "--iptables=false"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 120
        command = ["docker", "-H", self.address, "version"]
        while subprocess.run(command, capture_output=True, check=False).returncode:
            assert self._process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "dockerd does not answer"
            time.sleep(0.2)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def other_engine(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A second engine with the probe's image, which the docker runner uses in this test."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        lacking("a Docker engine of our own wants root and dockerd")
    # Sockets have short names.
    folder = Path(tempfile.mkdtemp(prefix="geb-"))
    engine = Engine(folder)
    engine.start()
    try:
        with subprocess.Popen(["docker", "save", PROBE_IMAGE], stdout=subprocess.PIPE) as saved:
            load = ["docker", "-H", engine.address, "load"]
            subprocess.run(load, stdin=saved.stdout, check=True)
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        yield engine
    finally:
        engine.stop()
        shutil.rmtree(folder)


def test_a_restarted_engine_fails_the_stage_clearly_and_the_run_resumes(
    store: LocalStore, other_engine: Engine, prefect_server: str, tmp_path: Path
) -> None:
    config = ProbeConfig(
        name="restarted",
        store=str(store.root),
        probes=(ProbeParams(behaviour="hang_once"),),
        execution=Execution(runner="docker", retries=0, docker=settings()),
    )
    command = [sys.executable, "-m", "tests.flows.probe_flow", str(write_probes(tmp_path, config))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        hanging_pids(store.root)
        other_engine.stop()
        _, output = process.communicate()
    assert process.returncode != 0
    assert "the Docker engine, or container" in output, output
    other_engine.start()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert len(list(store.artifacts())) == 1
    with contextlib.closing(docker.from_env()) as client:
        assert left_of(client, store) == []


def test_a_stage_is_not_started_where_another_runner_computes_its_key(
    store: LocalStore, engine: docker.DockerClient
) -> None:
    """The lease works across containers and processes."""
    request = probe_request(store, behaviour="work")
    lease = store.lease("probe", request.key)
    lease.acquire()
    released = []

    def hear(event: object) -> None:
        if "is being computed by" in str(event) and not released:
            released.append(True)
            lease.release()

    runner = DockerRunner(settings())
    runner.run(request, hear)
    assert released
    wait_until(lambda: store.load("probe", request.key))
    assert run(request) != []
