"""Stages as jobs of a real Slurm cluster: their ends told apart, refusals, the whole loop."""

import contextlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.runners.slurm import client
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Event, Log
from stages.contract.request import Request, Resources
from stages.store.base import Store
from tests.at_work import AtWork, at_work, hangs, said
from tests.flows.loop import geb_ok, geb_refused, plan, result_digests, write_config
from tests.probe_requests import probe_request
from tests.slurm.jobs import is_over, job_of, run, runner, settings, work_key

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
        ({"partition": "nix"}, Resources(), "execution.slurm.partition is 'nix'"),
        ({}, Resources(gpus=9), "asks for 1 nodes with 9 GPUs"),
        ({"sbatch_options": ["--constraint=h100"]}, Resources(), "--constraint=h100"),
        ({}, Resources(nodes=99), "asks for 99 nodes with 0 GPUs"),
        ({"time_limit": "30-0"}, Resources(), "execution.slurm.time_limit is '30-0'"),
    ],
    ids=str,
)
def test_what_the_cluster_will_never_run_is_refused_with_the_setting(
    store: Store, changes: dict[str, str], resources: Resources, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(probe_request(store, resources), **changes)
    assert "sinfo" in caught.value.remedy
    assert list((store.root / "slurm/jobs").iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_wrong_setting_is_refused_before_the_first_stage(
    cluster: None, tmp_path: Path, command: str
) -> None:
    for name, value in (("partition", "nix"), ("time_limit", "30-0")):
        slurm = {"stages": {"evaluate": {name: value}}}
        config = write_config(tmp_path, execution={"runner": "slurm", "slurm": slurm})
        said = geb_refused(command, config)
        assert "evaluate: Slurm refuses the job" in said
        assert f"execution.slurm.{name} is '{value}'" in said
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


def test_shards_of_a_step_are_one_array_whose_tasks_end_apart(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = client.submit, []

    def counted(options: list[str], program: str) -> subprocess.CompletedProcess[str]:
        calls.append(options)
        return submit(options, program)

    monkeypatch.setattr(client, "submit", counted)
    shards = [probe_request(store, message=str(number)) for number in range(SHARDS - 2)]
    shards += [probe_request(store, behaviour=each) for each in ("crash", "kill_self")]
    chosen = runner()

    def one(request: Request) -> BaseException | None:
        try:
            chosen.run(request, lambda event: None)
        except StageFailedError as error:
            return error
        return None

    with ThreadPoolExecutor(SHARDS) as pool:
        errors = list(pool.map(one, shards))
    print(f"{SHARDS} shards: {len(calls)} calls of sbatch")
    assert len(calls) < SHARDS / 2
    assert errors[:-2] == [None] * (SHARDS - 2)
    assert "boom" in str(errors[-2])
    assert "SIGKILL" in str(errors[-1])
    for request in shards[:-2]:
        assert store.load("probe", request.key) is not None


def test_the_tasks_of_an_array_stop_with_their_run(store: Store) -> None:
    chosen = runner()
    requests = [probe_request(store, behaviour="hang", message=str(each)) for each in range(2)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        stack.callback(chosen.stop_all)
        started = [pool.submit(AtWork, each, chosen, hangs) for each in requests]
        work = [each.result() for each in started]
        for each in work:
            each.wait()
        assert any("_" in job_of(each) for each in work), "an array"
        # One of them ends alone.
        client.cancel([job_of(work[0])])
        assert isinstance(work[0].join(), UserError)
        assert not any(is_over(job_of(each)) for each in work[1:])
        chosen.stop_all()
        assert all(isinstance(each.join(), StoppedError) for each in work[1:])


def test_a_stage_in_an_image_sees_store_code_and_cache_and_no_more(
    store: Store, tmp_path: Path
) -> None:
    commands, image, cache = tmp_path / "bin", tmp_path / "image", tmp_path / "cache"
    for each in (commands, image, cache):
        each.mkdir()
    shutil.copy(Path(__file__).with_name("apptainer.sh"), commands / "apptainer")
    # What the image holds: a system, and a Python with the stages' packages.
    holds = {"/usr", "/etc", sys.prefix, sys.base_prefix}
    (image / "holds").write_text("".join(f"{each}\n" for each in sorted(holds)))
    environment = settings().environment | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HF_HOME": str(cache),
        "APPTAINER_BINDPATH": str(tmp_path / "code"),
    }
    chosen = {"image": str(image), "environment": environment}
    seen = run(probe_request(store, behaviour="write", path=f"{cache}/seen"), **chosen)
    assert (cache / "seen").read_text() == "written", said(seen)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    request = probe_request(store, behaviour="write", path=f"{elsewhere}/seen")
    with pytest.raises(StageFailedError, match="No such file"):
        run(request, **chosen)


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
        assert is_over(job_of(work))
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    [log] = store.log_path("probe", work_key(store)).glob("*.log")
    assert "CANCELLED" in log.read_text(), "by a signal to its step, not by the end of the job"


def test_a_person_s_scancel_is_not_retried(store: Store) -> None:
    with at_work(probe_request(store, behaviour="hang"), runner()) as work:
        client.cancel([job_of(work)])
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
        assert is_over(job_of(work))
