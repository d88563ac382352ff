from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest

from flows.execution import overlap
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


def test_the_wait_for_an_earlier_run_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (
        SimpleNamespace(id=uuid4(), name=name, start_time=n) for n, name in enumerate("ab")
    )
    own.start_time = 2
    answers: list[Any] = [[own, other], httpx.ConnectError("being started"), [own]]

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def read_flow_runs(self, **filters: Any) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", str(uuid4()))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(own.id))
    monkeypatch.setattr(overlap, "get_client", lambda sync_client: Client())
    monkeypatch.setattr(overlap, "get_run_logger", lambda: logging.getLogger())
    monkeypatch.setattr(overlap, "stops_when_cancelled", lambda *_: nullcontext())
    overlap.settle_overlap("wait")
    assert answers == []
