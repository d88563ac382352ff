"""Stages as jobs of a real Slurm cluster: their ends told apart, refusals, the whole loop."""

from pathlib import Path
from typing import Any

import pytest

from flows.runners.slurm import client
from flows.runners.slurm.job import submit_options
from flows.runners.slurm.submission import check_job
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Event, Log
from stages.contract.request import Resources
from stages.store.base import Store
from tests.at_work import at_work, said
from tests.flows.loop import geb_ok, geb_refused, plan, result_digests, write_config
from tests.flows.probes import wait_until
from tests.probe_requests import probe_request
from tests.slurm.jobs import execution, is_over, job_of, run, runner, settings, work_key

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

SHARDS = 20


def test_a_stage_gets_its_gpus_and_none_of_the_orchestrator_s_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEB_WORKER", "secret")
    request = probe_request(store, Resources(gpus=2), behaviour="tell_place")
    heard = run(request)
    assert store.load("probe", request.key) is not None
    assert "worker None, GPUs '0,1'" in said(heard)
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert "worker None" in log.read_text()
    assert list((store.root / "slurm/jobs").iterdir()) == [], "the job's folder is gone"


def test_a_stage_without_gpus_sees_none(store: Store) -> None:
    heard = run(probe_request(store, behaviour="tell_place"), environment=place_of(settings()))
    assert "worker node, GPUs ''" in said(heard)


def place_of(chosen) -> dict[str, str]:
    return chosen.environment | {"GEB_WORKER": "node"}


def test_a_mistake_a_crash_and_a_kill_are_told_apart(store: Store) -> None:
    with pytest.raises(UserError, match="bad value 7") as refused:
        run(probe_request(store, behaviour="refuse"))
    assert refused.value.remedy == "use 8"
    with pytest.raises(StageFailedError, match="RuntimeError: boom") as crashed:
        run(probe_request(store, behaviour="crash"))
    assert any("Traceback" in line for line in crashed.value.last_lines)
    assert not isinstance(crashed.value, PreemptedError)
    with pytest.raises(StageFailedError, match=r"SIGKILL.*memory"):
        run(probe_request(store, behaviour="kill_self"))


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
    store: Store, changes: dict[str, Any], resources: Resources, message: str
) -> None:
    request = probe_request(store, resources)
    chosen = execution(**changes)
    options = submit_options(request, chosen.slurm, chosen.grace_seconds)
    with pytest.raises(UserError, match=message) as caught:
        check_job(request, chosen, options)
    assert "sinfo" in caught.value.remedy


def test_a_job_that_would_be_pending_for_ever_is_refused_and_cancelled(store: Store) -> None:
    with pytest.raises(UserError, match=r"PartitionTimeLimit.*--time=30-0"):
        run(probe_request(store), time_limit="30-0")
    assert list((store.root / "slurm/jobs").iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_wrong_setting_is_refused_before_the_first_stage(
    cluster: None, tmp_path: Path, command: str
) -> None:
    slurm = {"stages": {"evaluate": {"partition": "nix"}}}
    config = write_config(tmp_path, execution={"runner": "slurm", "slurm": slurm})
    said = geb_refused(command, config)
    assert "evaluate: Slurm refuses the job" in said
    assert "--partition=nix" in said
    assert not (tmp_path / "store/artifacts").exists()


def test_the_loop_as_jobs_ends_with_the_digests_of_processes(
    cluster: None, finished: Path, tmp_path: Path
) -> None:
    slurm = settings().model_dump(mode="json")
    config = write_config(tmp_path, execution={"runner": "slurm", "parallel": 2, "slurm": slurm})
    geb_ok("run", config)
    store = tmp_path / "store"
    assert result_digests(store) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {each["action"] for each in planned.values()} == {"reuse"}, "processes find it all"


def test_a_stage_that_takes_too_long_is_ended(store: Store) -> None:
    request = probe_request(store, Resources(timeout_seconds=1), behaviour="hang")
    with pytest.raises(StageFailedError, match="timeout_seconds=1"):
        run(request)


def test_stop_all_lets_a_stage_save_and_leaves_no_process_behind(store: Store) -> None:
    chosen = runner()
    with at_work(probe_request(store, behaviour="leave_child"), chosen) as work:
        pids = work.pids
        chosen.stop_all()
        assert isinstance(work.join(), StoppedError)
        wait_until(lambda: is_over(job_of(work)))
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    [log] = store.log_path("probe", work_key(store)).glob("*.log")
    assert "CANCELLED" in log.read_text(), "by a signal to its step, not by the end of the job"


def test_a_person_s_scancel_is_not_retried(store: Store) -> None:
    with at_work(probe_request(store, behaviour="hang"), runner()) as work:
        client.cancel(job_of(work))
        error = work.join()
    assert isinstance(error, UserError)
    assert "was cancelled" in error.message


def test_a_job_that_is_pending_is_taken_back(store: Store) -> None:
    chosen = runner(sbatch_options=("--begin=now+1hour",))

    def pending(event: Event) -> bool:
        return isinstance(event, Log) and "pending: BeginTime" in event.message

    with at_work(probe_request(store), chosen, pending) as work:
        chosen.stop_all()
        assert isinstance(work.join(), StoppedError)
        wait_until(lambda: is_over(job_of(work)))
