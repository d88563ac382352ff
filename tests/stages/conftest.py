"""Fixtures of several stages."""

import threading
from pathlib import Path

import pytest

from stages.store.base import Store
from tests.scripted_server import ScriptedServer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.open(str(tmp_path / "store"), create=True)


@pytest.fixture
def serve(monkeypatch):
    """Starts scripted servers, which end with the test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(behave):
        server = ScriptedServer(behave)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()
