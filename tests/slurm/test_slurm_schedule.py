"""A schedule made from a terminal: it fires, its stages are Slurm jobs, and Retry mends it."""

import re
from uuid import UUID

import pytest
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.states import AwaitingRetry

from tests.flows.loop import geb_ok, write_config
from tests.flows.probes import wait_until
from tests.flows.standing.standing import Up, failing_once, geb_up

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_scheduled_run_of_jobs_fails_and_the_ui_s_retry_goes_on(launcher, tmp_path, monkeypatch):
    config = write_config(
        tmp_path,
        name="nightly",
        inputs={"oracle_code": str(failing_once(tmp_path))},
        execution=launcher.settings() | {"retries": 0},
    )
    with geb_up(tmp_path) as (_, up):
        monkeypatch.setenv("PREFECT_API_URL", up.api)
        geb_ok("schedule", config, "--cron", "* * * * *", "--same", "--runner", "slurm")
        run = fired(up)
        with up.client() as client:
            deployment = client.read_deployment_by_name("iterate/iterate")
            [schedule] = deployment.schedules
            client.update_deployment_schedule(deployment.id, schedule.id, active=False)
        assert up.wait(run).state_name == "Failed"
        before = up.steps(run)
        [failed] = [name for name, state in before.items() if state == "Failed"]
        done = {name for name, state in before.items() if state == "Completed"}
        assert "iteration-1/generate/0" in done
        assert jobs(up, run) == done | {failed}
        with up.client() as client:
            # What the UI's button Retry asks for.
            client.set_flow_run_state(run, AwaitingRetry(), force=True)
        assert up.wait(run).state_name == "Completed"
        # A step that waited in vain the first time stays in the list as such.
        after = {name: state for name, state in up.steps(run).items() if state != "NotReady"}
        assert jobs(up, run) == set(after), "the rest as jobs, too"
    assert {name for name, state in after.items() if state == "Cached"} == done
    assert {state for name, state in after.items() if name not in done} == {"Completed"}


def fired(up: Up) -> UUID:
    """The first flow run that the server's clock started."""

    def begun() -> list[UUID]:
        with up.client() as client:
            runs = client.read_flow_runs()
        return [run.id for run in runs if run.auto_scheduled and run.start_time]

    wait_until(begun)
    return begun()[0]


def jobs(up: Up, run: UUID) -> set[str]:
    """Names of a flow run's steps of which its log says that a Slurm job runs them."""
    with up.client() as client:
        names = {task_run.id: task_run.name for task_run in client.read_task_runs()}
        records = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])))
    return {
        names[record.task_run_id]
        for record in records
        if record.task_run_id and re.match(r"job \d+: geb-nightly-", record.message)
    }
