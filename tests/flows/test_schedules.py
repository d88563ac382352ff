"""`geb schedule` and `geb schedules` against a real Prefect server."""

import json
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.standing.deployments import register
from tests.flows.loop import geb, write_config

pytestmark = pytest.mark.slow


@pytest.fixture
def server(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Prefect server with the deployments of `geb up` and no schedule that another test made."""
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        register(str(tmp_path / "store"), tmp_path, 1)
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    for name in listed():
        assert geb("schedules", "remove", name).returncode == 0
    return prefect_server


def listed() -> dict[str, dict[str, Any]]:
    done = geb("schedules", "--json")
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)}


def test_a_schedule_is_made_paused_resumed_and_removed(server: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, name="nightly")
    options = ("--cron", "0 3 * * 1", "--timezone", "Europe/Berlin", "--set", "train.beta=0.07")
    done = geb("schedule", config, *options)
    assert done.returncode == 0, done.stderr
    made = listed()["nightly"]
    assert (made["when"], made["timezone"], made["active"]) == ("0 3 * * 1", "Europe/Berlin", True)
    assert (made["run"], made["runner"], made["fresh"]) == ("nightly", "process", True)
    with SyncPrefectClient(server) as client:
        [found] = client.read_deployment_by_name("iterate/iterate").schedules
    parameters = found.parameters
    assert parameters["config"]["train"]["beta"] == 0.07
    assert parameters["config"]["store"] == str(tmp_path / "store"), "from any folder"
    again = geb("schedule", config, *options)
    assert again.returncode == 64
    assert "there is a schedule 'nightly' already" in again.stderr
    assert geb("schedule", config, *options, "--name", "other", "--same").returncode == 0
    assert not listed()["other"]["fresh"]
    for command, active in (("pause", False), ("resume", True)):
        assert geb("schedules", command, "nightly").returncode == 0
        assert listed()["nightly"]["active"] is active
    assert "nightly" in geb("schedules").stdout
    for name in ("nightly", "other"):
        assert geb("schedules", "remove", name).returncode == 0
    assert listed() == {}
    gone = geb("schedules", "pause", "nightly")
    assert gone.returncode == 64
    assert "there is no schedule 'nightly'" in gone.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cron", "whenever"), "--cron 'whenever'"),
        (("--cron", "0 3 * * 1", "--timezone", "X"), "'X'"),
    ],
)
def test_a_cron_line_or_a_zone_that_is_none_is_refused(
    server: str, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    done = geb("schedule", write_config(tmp_path), *options)
    assert done.returncode == 64
    assert said in done.stderr
    assert listed() == {}


def test_without_a_server_the_remedy_names_geb_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    done = geb("schedules")
    assert done.returncode == 64
    assert "start `geb up`" in done.stderr
