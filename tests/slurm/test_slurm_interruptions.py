"""Jobs of a real Slurm cluster that are preempted, run out of time, or lose their orchestrator."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows.execution.observer import Observer
from flows.execution.step_executor import StepExecutor
from flows.pipeline.step import Step
from flows.runners.slurm.runner import SlurmPlace
from flows.runners.slurm.work import folders_for
from stages.contract.errors import PreemptedError
from stages.contract.events import Event
from stages.contract.request import Request
from stages.store.base import Store
from tests.at_work import at_work, hangs, said
from tests.flows.probe_flow import ProbeConfig
from tests.flows.probes import wait_until
from tests.flows.test_slurm_submission import job_of
from tests.orchestrators import orchestrator
from tests.probe_requests import probe_request
from tests.probe_stage import ProbeParams
from tests.slurm.conftest import jobs_of
from tests.slurm.jobs import execution, paused, run, runner, take_all_nodes, work_key
from tests.stages.train.train_helpers import make_pairs, request_for
from tests.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]


class Preemptions(Observer):
    """Does something when a stage hangs for the first time, and hears what comes of it."""

    def __init__(self, disturb: Callable[[], None]) -> None:
        self.heard: list[str] = []
        self._disturb = disturb

    def step_started(self, request: Request) -> None:
        self.heard.append("started")

    def stage_event(self, request: Request, event: Event) -> None:
        if hangs(event):
            self._disturb()

    def step_preempted(self, request: Request, message: str) -> None:
        self.heard.append(message.split(": ")[1].split("; ")[0])


def set_down(store: Store) -> None:
    [job] = jobs_of(store)
    command = ["scontrol", "update", f"NodeName={job.nodes}", "State=DOWN", "Reason=test"]
    subprocess.run(command, check=True)


@pytest.mark.parametrize(
    ("disturb", "said"),
    [(lambda store: take_all_nodes(), "was preempted"), (set_down, "lost a node (NODE_FAIL)")],
    ids=["preempted", "set down"],
)
def test_a_stage_that_is_preempted_or_loses_its_node_goes_on_in_another_job_without_a_retry(
    store: Store, disturb: Callable[[Store], None], said: str
) -> None:
    chosen = execution().model_copy(update={"retries": 0})
    executor = StepExecutor(ProbeConfig(store=str(store.root), execution=chosen))
    observer = Preemptions(lambda: disturb(store))
    try:
        executor.execute(Step("probe/0", ProbeParams(behaviour="hang_once"), {}), {}, observer)
    finally:
        executor.stop()
        for node in ("node1", "node2"):
            subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
    assert observer.heard[::2] == ["started", "started"]
    assert said in observer.heard[1]


def test_a_stage_is_told_of_its_time_limit_ahead_of_it(store: Store) -> None:
    with pytest.raises(PreemptedError, match=r"was sent SIGTERM: by Slurm, near its time limit"):
        run(probe_request(store, behaviour="hang"), time_limit="1")
    [log] = store.log_path("probe", work_key(store)).glob("*.log")
    assert "asked to stop" in log.read_text() or "CANCELLED" in log.read_text()


@pytest.mark.parametrize("on_death", ["stop", "keep"])
def test_a_job_outlives_its_orchestrator_until_another_one_takes_it_over(
    store: Store, on_death: str
) -> None:
    request = probe_request(store, behaviour="hang")
    with orchestrator(request, execution(on_death)) as (_, pids):
        pass
    chosen = runner(death=on_death)
    with at_work(request, chosen) as work:
        assert said(work.heard)[0].startswith("taking over job ")
        assert work.pids == pids, "what it has said before is heard again"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_job_without_an_orchestrator_ends_itself(store: Store) -> None:
    request = probe_request(store, behaviour="leave_child")
    with orchestrator(request, execution()) as (_, pids):
        pass
    wait_until(lambda: not jobs_of(store))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    # The next orchestrator of the key keeps its log and removes its folder.
    [folder] = folders_for(request)
    SlurmPlace(execution()).find(job_of(request))
    assert not folder.exists()
    [left] = store.log_path("probe", request.key).glob("left-*.log")
    assert "no sign of the orchestrator" in left.read_text()
    assert list((store.root / "slurm/jobs").iterdir()) == []


def is_training(process: psutil.Process, store: Store) -> bool:
    """True of a stage's own process, not of the supervisor and srun above it."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    in_store = any(word.startswith(str(store.root)) for word in words)
    return in_store and "stages.train" in words and "stages.harness.supervisor" not in words


def test_a_training_whose_orchestrator_is_killed_saves_the_step_that_it_is_at(
    store: Store, tmp_path: Path
) -> None:
    make_tiny_llama(tmp_path / "policy")
    pairs = [make_pairs(tmp_path / "pairs.parquet", 1024)]  # It is not to end before it is paused.

    def training(place: Path) -> Request:
        # As often as by default: not before the training's end.
        return request_for(place, tmp_path / "policy", pairs, checkpoint_every_steps=None)

    request = training(store.root)
    with orchestrator(request, execution(), until='"loss"') as (process, _):
        [trainer] = (each for each in psutil.process_iter() if is_training(each, store))
        with paused({trainer}):
            process.kill()
    wait_until(lambda: not jobs_of(store))
    heard = run(request)
    assert any("going on after step" in each for each in said(heard))
    run(training(tmp_path / "calm"))
    digests = [
        artifact.manifest.digest("")
        for place in (store, Store.open(str(tmp_path / "calm")))
        if (artifact := place.load("train", request.key))
    ]
    assert len(digests) == 2
    assert digests[0] == digests[1]
