"""A real Prefect server for the flow tests, and one finished small run that they compare with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.loop import geb, write_config

_START_SECONDS = 120


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of our own on loopback, with SQLite; every `geb` of the test uses it."""
    home = tmp_path_factory.mktemp("prefect")
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = os.environ | {"PREFECT_HOME": str(home)}
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=log,
        )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                break
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, (home / "server.log").read_text()
            assert time.monotonic() < deadline, "the Prefect server does not answer"
            time.sleep(0.2)
    previous = {name: os.environ.get(name) for name in ("PREFECT_API_URL", "PREFECT_HOME")}
    os.environ |= {"PREFECT_API_URL": url, "PREFECT_HOME": str(home)}
    yield url
    for name, value in previous.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    server.terminate()
    server.wait()


@pytest.fixture(scope="session")
def finished(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a small run that went through undisturbed; do not change its store."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder)
    done = geb("run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    return config
