"""Stages as jobs of a real Slurm cluster: ends told apart, kills, preemption, several nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.execution.observer import Observer, observing
from flows.execution.step_executor import StepExecutor
from flows.pipeline.placement import Execution
from flows.pipeline.steps import Step
from flows.runners.slurm import client
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Event, Log, Metric
from stages.contract.local_store import LocalStore
from stages.contract.request import Request, Resources
from tests.at_work import at_work, said
from tests.flows.loop import geb, plan, result_digests, write_config
from tests.flows.probe_flow import ProbeConfig
from tests.flows.probes import wait_until
from tests.probe_requests import probe_request
from tests.probe_stage import ProbeParams
from tests.slurm.conftest import jobs_of
from tests.slurm.jobs import is_over, job_of, run, runner, settings
from tests.stages.train.train_helpers import make_pairs
from tests.stages.train.train_helpers import request_for as train_request
from tests.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_stage_gets_its_gpus_and_none_of_the_orchestrator_s_environment(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEB_WORKER", "secret")
    request = probe_request(store, Resources(gpus=2), behaviour="tell_place")
    heard = run(request)
    assert store.load("probe", request.key) is not None
    assert "worker None, GPUs '0,1'" in said(heard)
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert "worker None" in log.read_text()
    assert list((store.root / "slurm/jobs").iterdir()) == [], "the job's folder is gone"


def test_a_stage_without_gpus_sees_none(store: LocalStore) -> None:
    heard = run(probe_request(store, behaviour="tell_place"), environment=place_of(settings()))
    assert "worker node, GPUs ''" in said(heard)


def place_of(chosen) -> dict[str, str]:
    return chosen.environment | {"GEB_WORKER": "node"}


def test_a_mistake_a_crash_and_a_kill_are_told_apart(store: LocalStore) -> None:
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
        ({"constraint": "h100"}, Resources(), "execution.slurm.constraint is 'h100'"),
        ({}, Resources(nodes=99), "asks for 99 nodes with 0 GPUs"),
        ({"time_limit": "30-0"}, Resources(), "execution.slurm.time_limit is '30-0'"),
    ],
    ids=str,
)
def test_what_the_cluster_will_never_run_is_refused_with_the_setting(
    store: LocalStore, changes: dict[str, str], resources: Resources, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(probe_request(store, resources), **changes)
    assert "sinfo" in caught.value.remedy
    assert list((store.root / "slurm/jobs").iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_wrong_setting_is_refused_before_the_first_stage(
    cluster: None, tmp_path: Path, command: str
) -> None:
    slurm = {"stages": {"evaluate": {"partition": "nix"}}}
    config = write_config(tmp_path, execution={"runner": "slurm", "slurm": slurm})
    done = geb(command, config)
    assert done.returncode == 64
    assert "evaluate: Slurm refuses the job" in done.stderr
    assert "execution.slurm.partition is 'nix'" in done.stderr
    assert not (tmp_path / "store/artifacts").exists()


def test_the_loop_as_jobs_ends_with_the_digests_of_processes(
    cluster: None, finished: Path, tmp_path: Path
) -> None:
    slurm = settings().model_dump(mode="json")
    config = write_config(tmp_path, execution={"runner": "slurm", "parallel": 2, "slurm": slurm})
    done = geb("run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    store = tmp_path / "store"
    assert result_digests(store) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {each["action"] for each in planned.values()} == {"reuse"}, "processes find it all"


def test_a_stage_that_takes_too_long_is_ended(store: LocalStore) -> None:
    request = probe_request(store, Resources(timeout_seconds=1), behaviour="hang")
    with pytest.raises(StageFailedError, match="timeout_seconds=1"):
        run(request)


def test_stop_all_lets_a_stage_save_and_leaves_no_process_behind(store: LocalStore) -> None:
    chosen = runner()
    with at_work(probe_request(store, behaviour="leave_child"), chosen) as work:
        pids = pids_of(work.heard)
        chosen.stop_all()
        assert isinstance(work.join(), StoppedError)
        assert is_over(job_of(work))
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    [log] = store.log_path("probe", work_key(store)).glob("*.log")
    assert "CANCELLED" in log.read_text(), "by a signal to its step, not by the end of the job"


def work_key(store: LocalStore) -> str:
    [folder] = (store.root / "logs/probe").iterdir()
    return folder.name


def pids_of(heard: list[Event]) -> list[int]:
    [line] = [each for each in said(heard) if each.startswith("pids ")]
    return [int(each) for each in line.split()[1:]]


def test_a_person_s_scancel_is_not_retried(store: LocalStore) -> None:
    with at_work(probe_request(store, behaviour="hang"), runner()) as work:
        client.cancel([job_of(work)])
        error = work.join()
    assert isinstance(error, UserError)
    assert "was cancelled" in error.message


def test_a_job_that_is_pending_is_taken_back(store: LocalStore) -> None:
    chosen = runner(sbatch_options=("--begin=now+1hour",))

    def pending(event: Event) -> bool:
        return isinstance(event, Log) and "pending: BeginTime" in event.message

    with at_work(probe_request(store), chosen, pending) as work:
        chosen.stop_all()
        assert isinstance(work.join(), StoppedError)
        assert is_over(job_of(work))


def take_all_nodes() -> None:
    """Submits a job of the partition whose jobs take main's nodes."""
    options = ["--partition=high", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null"]
    done = client.submit(options, "#!/bin/bash\n")
    assert done.returncode == 0, done.stderr


class Preemptions(Observer):
    """Does something when a stage hangs for the first time, and hears what comes of it."""

    def __init__(self, disturb: Callable[[], None]) -> None:
        self.heard: list[str] = []
        self._disturb = disturb

    def step_started(self, request: Request) -> None:
        self.heard.append("started")

    def stage_event(self, request: Request, event: Event) -> None:
        if isinstance(event, Log) and event.message.startswith("pids "):
            self._disturb()

    def step_preempted(self, request: Request, message: str) -> None:
        self.heard.append(message.split(": ")[1].split("; ")[0])


def test_a_preempted_stage_saves_and_goes_on_in_another_job_without_a_retry(
    store: LocalStore,
) -> None:
    execution = Execution(
        runner="slurm", retries=0, retry_delay_seconds=0, grace_seconds=5, slurm=settings()
    )
    executor = StepExecutor(ProbeConfig(store=str(store.root), execution=execution))
    observer = Preemptions(take_all_nodes)
    with observing(observer):
        executor.execute(Step("probe/0", ProbeParams(behaviour="hang_once"), {}), {})
    executor.stop()
    assert observer.heard[::2] == ["started", "started"]
    assert observer.heard[1].endswith("was preempted")


def test_a_stage_is_told_of_its_time_limit_ahead_of_it(store: LocalStore) -> None:
    with pytest.raises(PreemptedError, match=r"came near its time limit \(00:01:00\)"):
        run(probe_request(store, behaviour="hang"), time_limit="1")
    [log] = store.log_path("probe", work_key(store)).glob("*.log")
    assert "asked to stop" in log.read_text() or "CANCELLED" in log.read_text()


ORCHESTRATOR = """
import sys
from pathlib import Path
from flows.pipeline.slurm import SlurmSettings
from flows.runners.slurm.runner import SlurmRunner
from stages.contract.request import Request
hear = lambda event: print(event.model_dump_json(), flush=True)
settings = SlurmSettings.model_validate_json(sys.argv[2])
SlurmRunner(settings, grace_seconds=5).run(Request.read(Path(sys.argv[1])), hear)
"""


def kill_an_orchestrator(request: Request, folder: Path, **changes: Any) -> list[int]:
    """Starts a stage by another process and kills that; returns the stage's processes."""
    path = folder / "request.json"
    request.write(path)
    chosen = settings(**changes).model_dump_json()
    command = [sys.executable, "-c", ORCHESTRATOR, str(path), chosen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as orchestrator:
        assert orchestrator.stdout is not None
        line = next(line for line in orchestrator.stdout if "pids " in line)
        orchestrator.kill()
    return [int(each) for each in line.split("pids ")[1].split('"')[0].split()]


@pytest.mark.parametrize("on_death", ["stop", "keep"])
def test_a_job_outlives_its_orchestrator_until_another_one_takes_it_over(
    store: LocalStore, tmp_path: Path, on_death: str
) -> None:
    request = probe_request(store, behaviour="hang")
    pids = kill_an_orchestrator(request, tmp_path, on_orchestrator_death=on_death)
    chosen = runner(on_orchestrator_death=on_death)
    assert chosen.has_running(request)
    with at_work(request, chosen) as work:
        assert said(work.heard)[0].startswith("taking over job ")
        assert pids_of(work.heard) == pids, "what it has said before is heard again"
        assert not runner().has_running(request), "it has an orchestrator now"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_job_without_an_orchestrator_ends_itself(store: LocalStore, tmp_path: Path) -> None:
    request = probe_request(store, behaviour="leave_child")
    pids = kill_an_orchestrator(request, tmp_path, orchestrator_seconds=20)
    wait_until(lambda: not jobs_of(store))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    # The next orchestrator of the store keeps its log and removes its folder.
    run(probe_request(store))
    [left] = store.log_path("probe", request.key).glob("left-*.log")
    assert "SIGTERM" in left.read_text() or "CANCELLED" in left.read_text()
    assert list((store.root / "slurm/jobs").iterdir()) == []


def test_doctor_tries_a_job_and_says_what_it_finds(store: LocalStore) -> None:
    place = ("--runner", "slurm", "--store", store.root)
    assert geb("doctor", *place).returncode == 0
    done = geb("doctor", *place, "--set", "execution.slurm.set_up=['exit 1']", "--json")
    assert done.returncode == 1
    slurm, job = json.loads(done.stdout)
    assert slurm["ok"]
    assert "left nothing" in job["detail"]


def trains_on_two_nodes(store: Path, policy: Path, pairs: Path) -> Request:
    """A training of some seconds, under ZeRO-2 on gloo, in a store of its own."""
    request = train_request(
        store,
        policy,
        [pairs],
        nodes=2,
        epochs=12,
        micro_batch_tokens=16,
        checkpoint_every_steps=4,
        deepspeed={"zero_stage": 2},
    )
    return request.model_copy(update={"run": "test", "step": "train"})


def is_under_way(event: Event) -> bool:
    """Whether a training has made steps; with a first checkpoint if it began anew."""
    return isinstance(event, Metric) and event.step > 6


def kill_second_node(request: Request) -> None:
    """Kills all of the training that runs on its second node."""
    work = str(LocalStore.open(request.store).work_path(request.stage, request.key))
    found = [
        each
        for each in psutil.process_iter(["cmdline", "name"])
        if work in each.info["cmdline"] and each.info["name"].startswith("python")
    ]
    assert found
    for each in {below for top in found for below in (top, *top.children(recursive=True))}:
        each.kill()


def test_a_training_on_two_nodes_survives_kills_and_preemption_with_the_same_bytes(
    tmp_path: Path, store: LocalStore
) -> None:
    policy = make_tiny_llama(tmp_path / "policy")
    pairs = make_pairs(tmp_path / "pairs.parquet", 29, ties=(3, 7))
    undisturbed = trains_on_two_nodes(tmp_path / "other", policy, pairs)
    heard = run(undisturbed)
    assert any("joins 2 nodes" in line or "waiting for 1 times" in line for line in said(heard))

    request = trains_on_two_nodes(store.root, policy, pairs)
    with at_work(request, runner(), is_under_way) as work:
        kill_second_node(request)
        killed = work.join()
    assert type(killed) is StageFailedError
    with at_work(request, runner(), is_under_way) as work:
        take_all_nodes()
        preempted = work.join()
    assert isinstance(preempted, PreemptedError)
    assert "was preempted" in str(preempted)
    assert 1 < first_step(work.heard) < first_step(run(request)), "from later checkpoints"
    assert weights(undisturbed) == weights(request)


def first_step(heard: list[Event]) -> int:
    return min(each.step for each in heard if isinstance(each, Metric))


def weights(request: Request) -> bytes:
    artifact = LocalStore.open(request.store).load(request.stage, request.key)
    assert artifact is not None
    return artifact.file("checkpoint/model.safetensors").read_bytes()
