"""A Prefect server that we start serves its own UI and clients, and no other site's pages."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flows.standing.patient_server import Guarded, Message, Receive, Send
from flows.standing.server import start_server
from tests.flows.standing import free_port


async def _served(scope: Message, receive: Receive, send: Send) -> None:
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
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_only_its_own_pages_and_clients_are_served(kind, host, origin, is_served) -> None:
    seen: list[Message] = []

    async def send(message: Message) -> None:
        seen.append(message)

    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    guarded = Guarded(_served, {"127.0.0.1", "localhost", "::1", "geb.example"})
    scope = {"type": kind, "method": "POST", "headers": headers}
    asyncio.run(guarded(scope, lambda: asyncio.sleep(0), send))
    refused = {"http": "http.response.start", "websocket": "websocket.close"}[kind]
    assert seen[0]["type"] == ("served" if is_served else refused)
    assert is_served or kind == "websocket" or seen[0]["status"] == 403


PAGE = """<title>evil</title><script>
const api = %s;
const body = JSON.stringify({name: "evil"});
const json = {"Content-Type": "application/json"};
const tries = [
  {method: "POST", body, headers: json},
  {method: "POST", body, headers: {"Content-Type": "text/plain"}, mode: "no-cors"},
  {method: "GET"},
];
Promise.all(tries.map((each, i) => fetch(api + (i < 2 ? "/flows/" : "/admin/version"), each)
  .then(answer => answer.type == "opaque" ? "opaque" : answer.status, () => "failed")))
  .then(found => document.title = found.join(" "));
</script>"""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    """A server as `geb up` and `geb run` start it."""
    address = f"http://127.0.0.1:{free_port()}"
    server = start_server(address, tmp_path / "server.log", {"PREFECT_HOME": str(tmp_path)})
    yield f"{address}/api"
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


@pytest.mark.slow
@pytest.mark.browser
def test_a_page_of_another_origin_makes_nothing(api: str) -> None:
    from tests.flows.browser import browser_page

    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write((PAGE % json.dumps(api)).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Evil) as site, browser_page() as page:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{site.server_port}")
        page.wait_for_function("document.title != 'evil'")
        assert page.title() == "failed opaque failed"
        # Its own UI works.
        page.goto(f"{api.removesuffix('/api')}/flows")
        page.get_by_text("Run a flow to get started").wait_for()
        site.shutdown()
    json_of = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{api}/flows/count", b"{}", json_of)
    with urllib.request.urlopen(asked) as answer:
        assert json.loads(answer.read()) == 0
    asked = urllib.request.Request(f"{api}/flows/count", b"{}", json_of | {"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(asked)
