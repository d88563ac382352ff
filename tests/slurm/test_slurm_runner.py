"""Jobs of a real Slurm cluster: their devices, refusals, and what cancels them."""

import pytest

from flows.runners.slurm import client
from flows.runners.slurm.submission import check_job
from stages.contract.errors import PreemptedError, StoppedError, UserError
from stages.contract.events import Log
from stages.contract.request import Resources
from tests.at_work import at_work, said
from tests.flows.loop import geb_refused, write_config
from tests.flows.probes import wait_until
from tests.launchers.launcher import logs_of
from tests.slurm.jobs import is_over, job_of

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_job_has_the_variables_of_the_settings_alone(launcher, store, monkeypatch):
    monkeypatch.setenv("GEB_WORKER", "secret")
    for environment, worker in (({}, None), ({"GEB_WORKER": "node"}, "node")):
        request = launcher.request(store, behaviour="tell_place", message=str(worker))
        heard = launcher.run(request, environment=launcher.environment | environment)
        assert f"worker {worker}, GPUs ''" in said(heard)


@pytest.mark.parametrize(
    ("changes", "resources", "message"),
    [
        ({"partition": "nix"}, Resources(), "--partition=nix"),
        ({}, Resources(gpus=9), "--gres=gpu:9"),
        ({"sbatch_options": ["--constraint=h100"]}, Resources(), "--constraint=h100"),
        ({}, Resources(nodes=99), "--nodes=99"),
    ],
    ids=str,
)
def test_what_the_cluster_will_never_run_is_refused_with_the_option(
    launcher, store, changes, resources, message
):
    request = launcher.request(store, resources)
    chosen = launcher.execution(request, **changes)
    with pytest.raises(UserError, match=message) as caught:
        check_job(request, chosen)
    assert "sinfo" in caught.value.remedy


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_wrong_setting_is_refused_before_the_first_stage(launcher, tmp_path, command):
    slurm = {"stages": {"evaluate": {"partition": "nix"}}}
    config = write_config(tmp_path, execution={"runner": "slurm", "slurm": slurm})
    message = geb_refused(command, config)
    assert "evaluate: Slurm refuses the job" in message
    assert "--partition=nix" in message
    assert not (tmp_path / "store/artifacts").exists()


def test_a_person_s_scancel_is_not_retried(launcher, store):
    request = launcher.request(store, behaviour="hang")
    with at_work(request, launcher.runner(request)) as work:
        client.cancel(job_of(work))
        error = work.join()
    assert isinstance(error, UserError)
    assert "was cancelled" in error.message


def test_a_job_that_is_pending_is_taken_back(launcher, store):
    request = launcher.request(store)
    runner = launcher.runner(request, sbatch_options=("--begin=now+1hour",))

    def pending(event):
        return isinstance(event, Log) and "pending: BeginTime" in event.message

    with at_work(request, runner, pending) as work:
        runner.stop_all()
        assert isinstance(work.join(), StoppedError)
        wait_until(lambda: is_over(job_of(work)))


def test_a_stage_hears_of_its_time_limit_ahead_of_it(launcher, store):
    request = launcher.request(store, behaviour="hang")
    with pytest.raises(PreemptedError, match=r"was sent SIGTERM: by Slurm, near its time limit"):
        launcher.run(request, time_limit="2")
    assert "asked to stop" in logs_of(request) or "CANCELLED" in logs_of(request)
