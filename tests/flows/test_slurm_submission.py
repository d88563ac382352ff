"""Submission of Slurm jobs without a cluster: a full queue, jobs that are there already."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flows.pipeline.placement import Execution, SlurmSettings
from flows.runners.local.process import ProcessRunner
from flows.runners.place import PlaceRunner, Poller, orchestrator_lease, work_name
from flows.runners.slurm import client
from flows.runners.slurm.folder import REQUEST_FILE, JobFolder
from flows.runners.slurm.job import batch_program, job_values
from flows.runners.slurm.runner import SlurmPlace
from flows.runners.slurm.submission import Submitter
from stages.contract.errors import StoppedError
from stages.contract.events import Event, Log
from stages.contract.request import Request
from stages.store.base import Store
from tests.flows.probes import wait_until
from tests.probe_requests import probe_request
from tests.programs import run_program

FULL = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
OTHERS_JOB = client.QueuedJob("1", "RUNNING", "None", "node1", "another")


class Scheduler:
    """Slurm's commands, in a cluster whose user has a job already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str | BaseException) -> None:
        self.calls: list[str] = []
        self.sizes: list[int] = []
        self.queue = [OTHERS_JOB]
        self._answers = iter(answers)
        self._submitting = threading.Lock()
        monkeypatch.setattr(client, "check", lambda options: "")
        for name in ("own_jobs", "submit"):
            monkeypatch.setattr(client, name, getattr(self, name))

    def own_jobs(self) -> list[client.QueuedJob]:
        self.calls.append("squeue")
        return self.queue

    def submit(self, options: list[str], program: str) -> subprocess.CompletedProcess[str]:
        assert self._submitting.acquire(blocking=False), "one at a time"
        # Long enough for others to come.
        time.sleep(0.01)
        self._submitting.release()
        arrays = [each for each in options if each.startswith("--array=0-")]
        self.sizes.append(int(arrays[0].rpartition("-")[2]) + 1 if arrays else 1)
        said = next(self._answers, "")
        if isinstance(said, BaseException):
            raise said
        self.calls.append("refused" if said else "taken")
        return subprocess.CompletedProcess([], bool(said), f"{len(self.calls)}\n", said)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return Scheduler(monkeypatch)


def runner() -> PlaceRunner[Any]:
    return PlaceRunner(SlurmPlace(Execution(slurm=SlurmSettings(poll_seconds=600))))


def submit(chosen: Submitter, request: Request, name: str) -> str:
    folder = JobFolder.create(Store.open(request.store), name, request)
    return chosen.submit(request, folder, "", lambda event: None, threading.Event())


class Together(threading.Event):
    """A run's stop sign, whose first look waits until so many threads want a job."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self._there: set[int] = set()

    def is_set(self) -> bool:
        self._there.add(threading.get_ident())
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        wait_until(lambda: len(self._there) == self._number)
        return super().wait(0)


def submit_together(request: Request, number: int) -> list[str]:
    """Submits jobs of so many threads at once."""
    chosen, stopping = Submitter(SlurmSettings(), 5), Together(number)

    def one(name: str) -> str:
        folder = JobFolder.create(Store.open(request.store), name, request)
        return chosen.submit(request, folder, "", lambda event: None, stopping)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(one, [f"job-{each}" for each in range(number)]))


def test_jobs_that_ask_for_the_same_at_once_are_one_array(
    request_: Request, scheduler: Scheduler
) -> None:
    jobs = submit_together(request_, 20)
    assert sorted(jobs) == sorted(f"1_{task}" for task in range(20))
    assert scheduler.calls == ["taken"]
    assert scheduler.sizes == [20]


def test_a_full_queue_gets_fewer_jobs_at_a_time_and_is_asked_for_room_by_one(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(monkeypatch, FULL, FULL, FULL, FULL, "")
    assert len(set(submit_together(request_, 8))) == 8
    assert scheduler.sizes == [8, 4, 2, 1, 1, 7]


def test_a_full_partition_holds_up_no_job_for_another_one(
    request_: Request, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, full = threading.Event(), threading.Event()

    def answer(options: list[str], program: str) -> subprocess.CompletedProcess[str]:
        if "--partition=gpu" in options and not taken.is_set():
            full.set()
            return subprocess.CompletedProcess([], 1, "", FULL)
        return subprocess.CompletedProcess([], 0, "1\n", "")

    monkeypatch.setattr(client, "submit", answer)
    stages = {"train": {"partition": "gpu"}}
    chosen = Submitter(SlurmSettings.model_validate({"poll_seconds": 0.01, "stages": stages}), 5)
    training = request_.model_copy(update={"stage": "train"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(submit, chosen, training, "train")
        assert full.wait(60)
        submit(chosen, request_, "other")
        assert not waiting.done()
        taken.set()
        assert waiting.result(60) == "1"


def test_jobs_that_are_taken_over_are_found_by_one_call_of_squeue(
    store: Store, scheduler: Scheduler
) -> None:
    requests = [probe_request(store, message=str(number)) for number in range(20)]
    an_hour_ago = time.time() - 3600
    for number, request in enumerate(requests):
        folder = JobFolder.create(store, work_name(request), request)
        # A thread that is held up asks again for a job that might be younger than the answer.
        os.utime(folder.path / REQUEST_FILE, (an_hour_ago, an_hour_ago))
        scheduler.queue.append(client.QueuedJob(str(number), "RUNNING", "None", "n1", folder.name))
    chosen = runner()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(chosen.has_running, requests))
    assert scheduler.calls == ["squeue"]


def test_the_time_without_an_answer_counts_from_the_first_question() -> None:
    answers: list[Any] = [{"a": 1}, OSError("away"), OSError("away"), {"a": 2}]

    def ask() -> dict[str, int]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    poller = Poller(ask, 0, (OSError,))
    silent = []
    for _ in range(4):
        # Its clock must move on between two questions.
        time.sleep(0.001)
        poller.look()
        silent.append(poller.silent_seconds)
    assert silent[0] == silent[3] == 0
    assert silent[1] > 0
    assert silent[2] > 0.001, "the time between the two is in it"


def test_a_job_whose_number_was_lost_on_the_way_is_found_by_its_name(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(monkeypatch, client.SlurmUnavailableError("sbatch: no answer in 120 s"))
    scheduler.queue.append(client.QueuedJob("7", "PENDING", "None", "", "mine"))
    asked = client.own_jobs
    away = iter([client.SlurmUnavailableError("squeue: no answer in 120 s")])

    def own_jobs() -> list[client.QueuedJob]:
        if (error := next(away, None)) is not None:
            raise error
        return asked()

    monkeypatch.setattr(client, "own_jobs", own_jobs)
    assert submit(Submitter(SlurmSettings(poll_seconds=0.01), 5), request_, "mine") == "7"
    assert scheduler.calls == ["squeue"], "no second one, whatever else was not answered"


def interrupt(event: Event) -> None:
    """Ends a runner's wait by the first thing that it says."""
    assert isinstance(event, Log)
    raise KeyboardInterrupt(event.message)


def test_a_key_that_another_orchestrator_looks_after_is_waited_for(
    request_: Request, scheduler: Scheduler
) -> None:
    chosen = runner()
    with orchestrator_lease(request_.store, request_.stage, request_.key) as lease:
        lease.acquire()
        with pytest.raises(KeyboardInterrupt, match=r"another run on .* looks after it"):
            chosen.run(request_, interrupt)
    assert "taken" not in scheduler.calls


def test_what_another_orchestrator_has_made_meanwhile_is_not_made_again(
    request_: Request, probe_stage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Scheduler(monkeypatch, AssertionError("it is made again"))
    with contextlib.ExitStack() as other:
        lease = other.enter_context(
            orchestrator_lease(request_.store, request_.stage, request_.key)
        )
        lease.acquire()

        def heard(event: Event) -> None:
            ProcessRunner(Execution()).run(request_, lambda _: None)
            other.close()

        runner().run(request_, heard)


def test_a_job_that_was_submitted_after_the_last_look_at_the_queue_is_found(
    request_: Request, store: Store, scheduler: Scheduler
) -> None:
    chosen = runner()
    for key in ("1", "2"):
        request = request_.model_copy(update={"key": key * 64})
        folder = JobFolder.create(store, work_name(request), request)
        # Times of files are coarse on some systems: a tick may lie before the last look.
        os.utime(folder.path / REQUEST_FILE, (time.time() + 1,) * 2)
        scheduler.queue.append(client.QueuedJob(key, "PENDING", "None", "", folder.name))
        assert chosen.has_running(request)


def test_a_task_of_an_array_is_found_by_its_number(
    request_: Request, store: Store, scheduler: Scheduler
) -> None:
    folder = JobFolder.create(store, work_name(request_), request_)
    folder.set_work("array_3")
    scheduler.queue.append(client.QueuedJob("7_2", "RUNNING", "None", "n1", "array"))
    assert not runner().has_running(request_), "another one's"
    scheduler.queue.append(client.QueuedJob("7_3", "PENDING", "None", "", "array"))
    assert runner().has_running(request_)


def test_a_job_that_was_told_to_end_is_not_taken_over(
    request_: Request, store: Store, scheduler: Scheduler
) -> None:
    folder = JobFolder.create(store, work_name(request_), request_)
    scheduler.queue.append(client.QueuedJob("7", "PENDING", "None", "", folder.name))
    assert runner().has_running(request_)
    folder.ask_to_stop()
    assert not runner().has_running(request_)


def test_a_job_of_an_orchestrator_that_died_while_it_called_sbatch_ends_itself(
    request_: Request, store: Store, scheduler: Scheduler
) -> None:
    chosen = runner()
    with pytest.raises(KeyboardInterrupt):
        chosen.run(request_.model_copy(update={"key": "0" * 64}), interrupt)
    late = JobFolder.create(store, work_name(request_), request_)
    with pytest.raises(KeyboardInterrupt, match=r"job \d+: geb-"):
        chosen.run(request_, interrupt)
    values = job_values(request_, Execution(), "request.json", late, sys.executable)
    done = run_program("bash", input=batch_program([values]))
    status = late.status()
    assert status is not None
    assert (done.returncode, status.code) == (143, 143)


def test_a_run_that_stops_submits_none_of_the_jobs_that_wait_their_turn(
    request_: Request, store: Store, scheduler: Scheduler
) -> None:
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(StoppedError):
        folder = JobFolder.create(store, "late", request_)
        Submitter(SlurmSettings(), 5).submit(request_, folder, "", lambda event: None, stopping)
    assert scheduler.calls == []
