"""A real Prefect server for the flow tests, and one finished small run that they compare with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.loop import geb, write_config
from tests.flows.prefect_server import Server
from tests.flows.standing import Up, geb_up


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of our own on loopback, with SQLite; every `geb` of the test uses it."""
    home = tmp_path_factory.mktemp("prefect")
    server = Server(home)
    server.start()
    previous = {name: os.environ.get(name) for name in ("PREFECT_API_URL", "PREFECT_HOME")}
    os.environ |= {"PREFECT_API_URL": server.api, "PREFECT_HOME": str(home)}
    yield server.api
    for name, value in previous.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    server.stop()


@pytest.fixture(scope="session")
def finished(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a small run that went through undisturbed; do not change its store."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder)
    done = geb("run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    return config


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A `geb up` at work, with a server, a worker and a store of its own."""
    with geb_up(tmp_path_factory.mktemp("up")) as (_, up):
        yield up
