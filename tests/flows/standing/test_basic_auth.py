"""A Prefect server behind basic authentication: runs that know the password, and that do not."""

import base64
import json
from http.server import BaseHTTPRequestHandler

import prefect
import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.standing.server import ensure_prefect_server
from stages.contract.errors import GebError, UserError
from tests.flows.loop import geb, geb_ok, geb_refused, warm_started
from tests.flows.standing.standing import SMALL_OVERRIDES, geb_up
from tests.scripted_server import served

PASSWORD = "admin:correct horse"
EXPECTED = f"Basic {base64.b64encode(PASSWORD.encode()).decode()}"


class _Guarded(BaseHTTPRequestHandler):
    version = prefect.__version__

    def do_GET(self):
        knows = self.headers.get("Authorization") == EXPECTED
        self.send_response(200 if knows else 401)
        self.end_headers()
        self.wfile.write(json.dumps(self.version).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def api():
    """Address of a guarded server's API."""
    with served(_Guarded) as url:
        yield f"{url}/api"


@pytest.mark.parametrize("password", [None, "admin:wrong", "admin"])
def test_a_client_without_the_password_reads_what_to_set(api, tmp_path, password):
    with (
        temporary_settings({PREFECT_API_URL: api, PREFECT_API_AUTH_STRING: password}),
        pytest.raises(UserError, match="does not let us in: 401") as caught,
    ):
        ensure_prefect_server(tmp_path / "log", print)
    assert "PREFECT_API_AUTH_STRING" in caught.value.remedy
    assert "wrong" not in str(caught.value)


def test_a_server_that_does_not_answer_is_named(tmp_path):
    nowhere = "http://127.0.0.1:9/api"
    with (
        temporary_settings({PREFECT_API_URL: nowhere}),
        pytest.raises(GebError, match=f"no Prefect server answers at {nowhere}"),
    ):
        ensure_prefect_server(tmp_path / "log", print)


@pytest.mark.slow
def test_a_password_is_asked_for_and_kept_from_stages(tmp_path, finished, copied):
    again = ("run", copied, "--set", "name=again")
    with geb_up(tmp_path, "--password") as (_, up):
        kept = up.home / "password"
        assert kept.stat().st_mode & 0o777 == 0o600
        shown = geb("up", "--home", up.home, "--store", up.store).stdout
        assert up.password in shown
        assert f'PREFECT_API_AUTH_STRING="$(cat {kept})"' in shown
        assert "does not let us in: 401" in geb_refused(*again, PREFECT_API_URL=up.api)
        geb_ok(*again, PREFECT_API_URL=up.api, PREFECT_API_AUTH_STRING=up.password)
        config = SMALL_OVERRIDES | {"name": "locked", "store": str(up.store)}
        config |= {"inputs": warm_started(finished)}
        ended = up.wait(up.start("iterate/iterate", preset="quickstart", config=config).id)
        with up.client() as client:
            assert [flow_run.state_name for flow_run in client.read_flow_runs()] == [
                "Completed"
            ] * 2
    assert ended.state_name == "Completed", ended.state
    contents = [path.read_bytes() for path in up.store.rglob("*") if path.is_file()]
    assert contents
    assert not any(up.password.encode() in content for content in contents)
