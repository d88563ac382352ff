"""`geb schedule` and `geb schedules` against a real Prefect server."""

from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.standing.deployments import register
from tests.flows.loop import geb, geb_json, geb_ok, geb_refused, write_config

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
    return {each["name"]: each for each in geb_json("schedules")}


def test_a_schedule_is_made_paused_resumed_and_removed(server: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, name="nightly")
    options = ("--cron", "0 3 * * 1", "--timezone", "Europe/Berlin", "--set", "train.beta=0.07")
    geb_ok("schedule", config, *options)
    made = listed()["nightly"]
    assert (made["when"], made["timezone"], made["active"]) == ("0 3 * * 1", "Europe/Berlin", True)
    assert (made["run"], made["runner"], made["fresh"]) == ("nightly", "process", True)
    with SyncPrefectClient(server) as client:
        [found] = client.read_deployment_by_name("iterate/iterate").schedules
    parameters = found.parameters
    assert parameters["config"]["train"]["beta"] == 0.07
    assert parameters["config"]["store"] == str(tmp_path / "store"), "from any folder"
    assert "there is a schedule 'nightly' already" in geb_refused("schedule", config, *options)
    assert geb("schedule", config, *options, "--name", "other", "--same").returncode == 0
    assert not listed()["other"]["fresh"]
    for command, active in (("pause", False), ("resume", True)):
        assert geb("schedules", command, "nightly").returncode == 0
        assert listed()["nightly"]["active"] is active
    assert "nightly" in geb("schedules").stdout
    for name in ("nightly", "other"):
        assert geb("schedules", "remove", name).returncode == 0
    assert listed() == {}
    assert "there is no schedule 'nightly'" in geb_refused("schedules", "pause", "nightly")


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
    assert said in geb_refused("schedule", write_config(tmp_path), *options)
    assert listed() == {}


def test_without_a_server_the_remedy_names_geb_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert "start `geb up`" in geb_refused("schedules")
