"""A Ray cluster of two nodes on loopback, by the program `ray` that GEB_RAY names."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.standing.server import free_port
from tests.conftest import finished, prefect_server, probe_stage
from tests.flows.loop import ROOT
from tests.flows.probes import wait_until

# pytest finds the project's fixtures by their names here.
__all__ = ["finished", "prefect_server", "probe_stage"]

PACKAGE = ROOT / "examples/runners/ray"
CARRIED = ("PYTHONPATH", "OMP_NUM_THREADS", "PYTHONMALLOC", "GLIBC_TUNABLES", "HF_HUB_OFFLINE")


class RayCluster:
    """A head node and another one, each the processes of one `ray start`."""

    def __init__(self, program: str, top: Path) -> None:
        self._ray = program
        self._address, port = f"127.0.0.1:{free_port()}", free_port()
        self.dashboard = f"http://127.0.0.1:{port}"
        self._log = (top / "log").open("w")
        at = ["--dashboard-host=127.0.0.1", f"--dashboard-port={port}", f"--temp-dir={top}"]
        head = ["--head", f"--port={self._address.partition(':')[2]}", *at]
        self._nodes = [self._start(*head)]
        wait_until(lambda: self.num_nodes() == 1)
        self._nodes.append(self._start(f"--address={self._address}"))
        wait_until(lambda: self.num_nodes() == 2)

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        common = ["--num-cpus=2", "--object-store-memory=100000000"]
        return subprocess.Popen(
            [self._ray, "start", "--block", "--disable-usage-stats", *common, *options],
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {"RAY_raylet_start_wait_time_s": "120", "NO_PROXY": "*"},
            start_new_session=True,
        )

    def num_nodes(self) -> int:
        """Nodes that are alive, as the dashboard has them."""
        with contextlib.suppress(httpx.HTTPError, KeyError):
            url = f"{self.dashboard}/nodes?view=summary"
            found = httpx.get(url, trust_env=False).json()["data"]["summary"]
            return sum(each["raylet"].get("state") == "ALIVE" for each in found)
        return 0

    @contextlib.contextmanager
    def without_second_node(self) -> Iterator[None]:
        """All processes of the second node are killed; there is another one after the block."""
        _kill(self._nodes.pop())
        try:
            yield
        finally:
            self._nodes.append(self._start(f"--address={self._address}"))
            wait_until(lambda: self.num_nodes() == 2)

    def end(self) -> None:
        """Kills both nodes."""
        for each in reversed(self._nodes):
            _kill(each)
        self._log.close()

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Settings of the runner."""
        carried = {name: os.environ[name] for name in CARRIED if name in os.environ}
        python = str(Path(self._ray).with_name("python"))
        known = {"address": self.dashboard, "python": python, "environment": carried}
        return known | {"poll_seconds": 0.5} | changes


def _kill(node: subprocess.Popen[bytes]) -> None:
    os.killpg(node.pid, signal.SIGKILL)
    node.wait()


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayCluster]:
    """The cluster; its runner can be named in configurations."""
    if (program := os.environ.get("GEB_RAY")) is None:
        pytest.skip("GEB_RAY names no program `ray` (pip install 'ray[default]')")
    # A socket's path may not be long.
    top = Path(tempfile.mkdtemp(prefix="geb-ray-"))
    made = RayCluster(program, top)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(top, ignore_errors=True)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as pip installs it, for this process and for those that it starts."""
    info = tmp_path / "site/geb_ray-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: geb-ray\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[geb.runners]\nray = geb_ray.place:RayPlace\n")
    places = [str(info.parent), str(PACKAGE), os.environ.get("PYTHONPATH", str(ROOT))]
    for each in places[:2]:
        monkeypatch.syspath_prepend(each)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
