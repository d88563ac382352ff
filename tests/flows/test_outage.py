from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from flows.execution.outage import survives_outage
from tests.flows.standing import free_port


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()


def test_a_call_is_made_again_until_the_server_listens() -> None:
    port = free_port()
    errors: list[httpx.ConnectError] = []

    @survives_outage
    def ask() -> int:
        if errors:
            server = HTTPServer(("127.0.0.1", port), Answer)
            threading.Thread(target=server.handle_request, daemon=True).start()
        try:
            return httpx.get(f"http://127.0.0.1:{port}").status_code
        except httpx.ConnectError as error:
            errors.append(error)
            raise

    assert ask() == 204
    assert len(errors) == 1


def test_another_error_is_not_taken_for_an_outage() -> None:
    @survives_outage
    def fail() -> None:
        raise httpx.ReadTimeout("slow")

    with pytest.raises(httpx.ReadTimeout):
        fail()
