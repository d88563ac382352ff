"""Submission of Slurm jobs without a cluster: a full queue, jobs that are there already."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.pipeline.placement import Execution
from flows.runners.place import PlaceAwayError, work_name
from flows.runners.runner import Runner
from flows.runners.slurm import client
from flows.runners.slurm.job import batch_program
from flows.runners.slurm.place import SlurmPlace
from flows.runners.slurm.submission import check_jobs
from flows.runners.slurm.work import jobs_folder
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Log
from stages.contract.request import Resources
from stages.store.base import Store
from tests.flows.runners.stage_jobs import job_of
from tests.programs import run_program

FULL = "sbatch: error: QOSMaxSubmitJobPerUserLimit"


class Scheduler:
    """Slurm's commands, in a cluster whose user has a job already."""

    def __init__(self, monkeypatch, *answers):
        self.calls = []
        self.queue = {"another": "1"}
        self._answers = iter(answers)
        for name in ("own_jobs", "submit"):
            monkeypatch.setattr(client, name, getattr(self, name))

    def own_jobs(self):
        self.calls.append("squeue")
        return self.queue

    def submit(self, options, program):
        answer = next(self._answers, "")
        if isinstance(answer, BaseException):
            raise answer
        self.calls.append("refused" if answer else "taken")
        return subprocess.CompletedProcess([], bool(answer), f"{len(self.calls)}\n", answer)


@pytest.fixture
def scheduler(monkeypatch):
    return Scheduler(monkeypatch)


def runner():
    return Runner(SlurmPlace(Execution()), Execution())


def new_folder(request):
    folder = jobs_folder(Store(Path(request.store))) / work_name(request)
    folder.mkdir(parents=True)
    return folder


def test_a_job_is_submitted_until_slurm_takes_it(request_, store, monkeypatch):
    monkeypatch.setattr("flows.runners.runner.ROOM_SECONDS", 0.01)
    scheduler = Scheduler(monkeypatch, FULL, FULL, PlaceAwayError("no answer in 120 s"), "")
    heard = []

    def hear(event):
        heard.append(event.message)
        if event.message.startswith("job "):
            interrupt(event)

    with pytest.raises(KeyboardInterrupt, match=r"job \d+: geb-"):
        runner().run(request_, hear)
    assert scheduler.calls[-1] == "taken"
    [_] = jobs_folder(store).iterdir()
    full, away, _ = heard
    assert "QOSMaxSubmitJobPerUserLimit" in full
    assert "no answer in 120 s" in away


def interrupt(event):
    """Ends a runner's wait by the first thing that it says."""
    assert isinstance(event, Log)
    raise KeyboardInterrupt(event.message)


def test_a_cancelled_job_is_not_taken_over(request_, store, scheduler):
    folder = new_folder(request_)
    scheduler.queue[folder.name] = "7"
    assert SlurmPlace(Execution()).find(job_of(request_)) is not None
    (folder / "stop").touch()
    assert SlurmPlace(Execution()).find(job_of(request_)) is None


def test_a_job_ends_itself_if_its_orchestrator_died_during_sbatch(request_, store, scheduler):
    chosen = runner()
    with pytest.raises(KeyboardInterrupt):
        chosen.run(request_.model_copy(update={"key": "0" * 64}), interrupt)
    late = new_folder(request_)
    with pytest.raises(KeyboardInterrupt, match=r"job \d+: geb-"):
        chosen.run(request_, interrupt)
    program = batch_program(request_, Execution(), "request.json", late, sys.executable)
    assert run_program("bash", input=program).returncode == 143


def test_a_run_that_ends_submits_no_waiting_job(request_, store, scheduler):
    ending = runner()
    ending.closed.set()
    with pytest.raises(StoppedError):
        ending.run(request_, lambda event: None)
    assert scheduler.calls == []


def test_a_stage_without_its_python_is_refused_before_a_run(scheduler):
    stages = {"generate": Resources(), "train": Resources()}
    interpreters = {"train": "/no/such/python"}
    with pytest.raises(UserError, match="/no/such/python for stage 'train'"):
        check_jobs(Execution(interpreters=interpreters), stages)
    slurm = {"stages": {"train": {"container": "apptainer exec train.sif"}}}
    check_jobs(Execution(interpreters=interpreters, slurm=slurm), stages)
