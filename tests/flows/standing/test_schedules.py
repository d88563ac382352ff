"""`geb schedule` against a real Prefect server."""

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.standing.deployments import register
from tests.flows.loop import geb, geb_ok, geb_refused, write_config

pytestmark = pytest.mark.slow


@pytest.fixture
def client(prefect_server, tmp_path, monkeypatch):
    """A client of a Prefect server with the deployments of `geb up` and no schedule."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        register(str(tmp_path / "store"), tmp_path, 1)
    with SyncPrefectClient(prefect_server) as client:
        deployment = client.read_deployment_by_name("iterate/iterate")
        for schedule in deployment.schedules:
            client.delete_deployment_schedule(deployment.id, schedule.id)
        yield client


def schedules(client):
    deployed = client.read_deployment_by_name("iterate/iterate").schedules
    return {schedule.slug: schedule for schedule in deployed}


def test_a_schedule_has_the_given_settings_as_its_parameters(client, tmp_path):
    config = write_config(tmp_path, name="nightly")
    options = ("--cron", "0 3 * * 1", "--timezone", "Europe/Berlin", "--set", "train.beta=0.07")
    printed = geb_ok("schedule", config, *options).stdout
    schedule = schedules(client)["nightly"]
    assert f"schedule pause iterate/iterate {schedule.id}\n" in printed
    assert schedule.active
    assert schedule.schedule.model_dump(include={"cron", "timezone"}) == {
        "cron": "0 3 * * 1",
        "timezone": "Europe/Berlin",
    }
    assert schedule.parameters["fresh"]
    assert schedule.parameters["config"]["train"]["beta"] == 0.07
    assert "max_grad_norm" not in schedule.parameters["config"]["train"], "no default"
    assert schedule.parameters["config"]["store"] == str(tmp_path / "store"), "from any folder"
    assert "there is a schedule 'nightly' already" in geb_refused("schedule", config, *options)
    assert geb("schedule", config, *options, "--set", "name=other", "--same").returncode == 0
    assert not schedules(client)["other"].parameters["fresh"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cron", "whenever"), "--cron 'whenever'"),
        (("--cron", "0 3 * * 1", "--timezone", "X"), "'X'"),
    ],
)
def test_a_cron_line_or_a_zone_that_is_none_is_refused(client, tmp_path, options, said):
    message = geb_refused("schedule", write_config(tmp_path), *options)
    assert said in message
    assert "pydantic" not in message
    assert schedules(client) == {}
