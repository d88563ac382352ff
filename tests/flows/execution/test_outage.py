"""A Prefect server that does not answer: calls, runs, commands and stages meanwhile."""

import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
import typer
from pydantic import BaseModel, model_serializer

from flows.commands import cli
from flows.execution import cancellation, prefect_api
from flows.execution.prefect_api import survives_outage
from flows.standing.server import free_port


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()


def test_a_call_is_made_again_until_the_server_listens():
    port = free_port()
    errors = []
    servers = []

    @survives_outage
    def ask():
        if errors:
            servers.append(HTTPServer(("127.0.0.1", port), Answer))
            threading.Thread(target=servers[0].handle_request, daemon=True).start()
        try:
            return httpx.get(f"http://127.0.0.1:{port}").status_code
        except httpx.ConnectError as error:
            errors.append(error)
            raise

    assert ask() == 204
    assert len(errors) == 1
    servers[0].server_close()


def test_another_error_is_not_taken_for_an_outage():
    @survives_outage
    def fail():
        raise httpx.ReadTimeout("slow")

    with pytest.raises(httpx.ReadTimeout):
        fail()


class Restarting:
    """The present run in Prefect, whose server is being started when it is asked first."""

    parent_flow_run_id = None

    def __init__(self):
        self.asked = 0

    def _answer(self):
        self.asked += 1
        if self.asked == 1:
            raise httpx.ConnectError("being started")

    id = root_flow_run_id = property(_answer)


def test_the_start_of_a_run_outlives_it(monkeypatch):
    prefect = Restarting()
    monkeypatch.setattr(cancellation, "present", prefect)
    monkeypatch.setattr(prefect_api, "_POLL_SECONDS", 0)
    monkeypatch.setattr(cancellation, "get_client", lambda sync_client: nullcontext())
    with cancellation.stops_when_cancelled(lambda state: None, threading.Event(), "it"):
        pass
    assert prefect.asked > 1


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_command_whose_server_is_gone_says_so_without_a_traceback(
    is_wrapped, monkeypatch, geb_here
):
    app = typer.Typer()

    @app.command()
    def run() -> None:
        error = httpx.ConnectError("All connection attempts failed")
        if is_wrapped:
            raise RuntimeError(f"Failed to reach API: {error}") from error
        raise error

    monkeypatch.setattr(cli, "app", app)
    code, output = geb_here()
    assert code == 1
    assert "the Prefect server does not answer: " in output
    assert "All connection attempts failed" in output
    assert "PREFECT_API_URL" in output
    assert "Traceback" not in output


def test_a_signal_that_a_library_wrapped_still_ends_a_command(monkeypatch, geb_here):
    """SIGTERM while Prefect is being loaded, which serialises its settings."""

    class Settings(BaseModel):
        @model_serializer(mode="plain")
        def interrupted(self) -> dict[str, int]:
            raise KeyboardInterrupt

    app = typer.Typer()
    app.command()(lambda: Settings().model_dump() and None)
    monkeypatch.setattr(cli, "app", app)
    code, output = geb_here()
    assert code == 130
    assert "Traceback" not in output
