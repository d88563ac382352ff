"""A Prefect server that we start serves its own UI and clients, and no other site's pages."""

import asyncio
import contextlib
import os
import sqlite3

import httpx
import pytest
from prefect.server.api import server
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy import text

from flows.standing.guarded_server import Guarded, create_app
from flows.standing.server import free_port, start_server


async def _served(scope, receive, send):
    await send({"type": "served"})


@pytest.mark.parametrize(
    ("host", "origin", "is_served"),
    [
        ("127.0.0.1:4200", None, True),
        ("localhost:4200", None, True),
        ("[::1]:4200", "http://[::1]:4200", True),
        ("127.0.0.1:4200", "http://127.0.0.1:4200", True),
        ("GEB.example:443", "https://geb.example:443", True),
        ("127.0.0.1:4200", "http://127.0.0.1:8000", False),
        ("127.0.0.1:4200", "http://localhost:4200", False),
        ("127.0.0.1:4200", "http://evil.example", False),
        ("127.0.0.1:4200", "null", False),
        # A name of the attacker's that leads to this machine.
        ("evil.example:4200", "http://evil.example:4200", False),
        ("evil.example:4200", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("", None, False),
        ("[", None, False),
    ],
)
@pytest.mark.parametrize(("kind", "answer"), [("http", "http"), ("websocket", "websocket.http")])
def test_only_its_own_pages_and_clients_are_served(kind, answer, host, origin, is_served):
    seen = []

    async def send(message):
        seen.append(message)

    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    guarded = Guarded(_served, ["127.0.0.1", "localhost", "[::1]", " GEB.example", ""])
    scope = {"type": kind, "method": "POST", "headers": headers}
    asyncio.run(guarded(scope, lambda: asyncio.sleep(0), send))
    assert seen[0]["type"] == ("served" if is_served else f"{answer}.response.start")
    assert is_served or seen[0]["status"] == 403


def test_a_transaction_that_reads_first_may_write_while_others_do(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "create_app", lambda final: _served)
    # Restored after the test.
    begin = AioSqliteConfiguration.begin_transaction
    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", begin)
    create_app()
    path = tmp_path / "prefect.db"
    add = "INSERT INTO runs VALUES (1)"

    async def read_and_write():
        config = AioSqliteConfiguration(f"sqlite+aiosqlite:///{path}")
        engine = await config.engine()
        async with await config.session(engine) as session, config.begin_transaction(session):
            await session.execute(text("SELECT * FROM runs"))
            with (
                contextlib.closing(sqlite3.connect(path, timeout=0)) as other,
                contextlib.suppress(sqlite3.OperationalError),
                other,
            ):
                other.execute(add)
            await session.execute(text(add))
        await engine.dispose()

    with contextlib.closing(sqlite3.connect(path)) as first:
        first.execute("PRAGMA journal_mode = WAL")
        first.execute("CREATE TABLE runs (number)")
        asyncio.run(read_and_write())
        assert first.execute("SELECT count(*) FROM runs").fetchone() == (1,)


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A server as `geb up` and `geb run` start it, where a user keeps a host from the proxy."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", ".example.org")
    address = f"http://127.0.0.1:{free_port()}"
    started = start_server(address, tmp_path / "server.log", {"PREFECT_HOME": str(tmp_path)})
    yield f"{address}/api"
    started.communicate()


@pytest.mark.slow
def test_a_page_of_another_origin_makes_nothing(api):
    ui = api.removesuffix("/api")
    for headers in ({"Origin": "http://127.0.0.1:1"}, {"Host": "evil.example"}):
        refused = httpx.post(f"{api}/flows/", json={"name": "evil"}, headers=headers)
        assert refused.status_code == 403
    assert httpx.get(ui, headers={"Origin": ui}, follow_redirects=True).is_success
    assert httpx.post(f"{api}/flows/count", json={}, headers={"Origin": ui}).json() == 0
    # Both, or a library that reads the one would ask the proxy.
    for name in ("NO_PROXY", "no_proxy"):
        assert os.environ[name] == ".example.org,127.0.0.1"
