"""An engine that is restarted."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import docker
import pytest

from tests.docker.containers import PROBE_IMAGE, Docker
from tests.flows.probe_flow import ProbeConfig
from tests.flows.probes import hanging_pids, write_probes
from tests.probe_stage import ProbeParams
from tests.programs import lacking

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.release]


class Engine:
    """A second Docker engine, which a test may restart."""

    def __init__(self, folder):
        self._folder = folder
        self.address = f"unix://{folder}/sock"

    def start(self):
        folder = self._folder
        with (folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                [
                    # It would take the other engine's bridge down if they shared a network.
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

    def stop(self):
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def other_engine(store, monkeypatch):
    """A second engine with the probe's image, which the docker runner uses in this test."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        lacking("a second Docker engine needs root and dockerd")
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


def test_a_run_outlives_a_restart_of_the_engine(
    launcher, store, other_engine, prefect_server, tmp_path
):
    execution = launcher.execution(launcher.request(store))
    config = ProbeConfig(
        name="restarted",
        store=str(store.root),
        probes=(ProbeParams(behaviour="hang_once"),),
        execution=execution.model_copy(update={"retries": 0}),
    )
    command = [sys.executable, "-m", "tests.flows.probe_flow", str(write_probes(tmp_path, config))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        hanging_pids(store.root)
        other_engine.stop()
        other_engine.start()
        _, output = process.communicate()
    assert process.returncode == 0, output
    assert "the Docker engine, or container" in output, output
    assert len(list(store.artifacts())) == 1
    with contextlib.closing(docker.from_env()) as client:
        assert Docker(client).left(store) == []
