"""Submission of Slurm jobs without a cluster: a full queue, turns, jobs that are there already."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.slurm import SlurmSettings
from flows.runners.slurm import client
from flows.runners.slurm.folder import REQUEST_FILE, JobFolder, job_folders, owner_path
from flows.runners.slurm.job import batch_program, new_name
from flows.runners.slurm.runner import SlurmRunner
from flows.runners.slurm.submission import Submitter
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Event, Log
from stages.contract.file_lease import FileLease
from stages.contract.local_store import LocalStore
from stages.contract.request import Request
from tests.probe_requests import probe_request

FULL = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
OTHERS_JOB = client.QueuedJob("1", "RUNNING", "None", "node1", "another")


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    return probe_request(LocalStore.open(str(tmp_path / "store"), create=True))


class Scheduler:
    """Slurm's commands, in a cluster whose user has a job already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str | BaseException) -> None:
        self.calls: list[str] = []
        self.queue = [OTHERS_JOB]
        self._answers = iter(answers)
        self._submitting = threading.Lock()
        for name in ("check", "own_jobs", "submit"):
            monkeypatch.setattr(client, name, getattr(self, name))

    def check(self, options: list[str]) -> str:
        self.calls.append("test")
        return ""

    def own_jobs(self) -> list[client.QueuedJob]:
        self.calls.append("squeue")
        return self.queue

    def submit(self, options: list[str], program: str) -> subprocess.CompletedProcess[str]:
        assert self._submitting.acquire(blocking=False), "one at a time"
        # Long enough for others to come.
        time.sleep(0.01)
        self._submitting.release()
        said = next(self._answers, "")
        if isinstance(said, BaseException):
            raise said
        self.calls.append("refused" if said else "taken")
        return subprocess.CompletedProcess([], bool(said), f"{len(self.calls)}\n", said)


def submitted(request: Request, name: str, *, has_live: bool = True) -> str:
    chosen = submitter(has_live=has_live)
    return chosen.submit(request, name, [], "", lambda event: None, threading.Event())


def submitter(*, has_live: bool = True, **changes: Any) -> Submitter:
    settings = SlurmSettings(poll_seconds=0.01, **changes)
    return Submitter(settings, 5, has_live=lambda: has_live)


def test_a_full_queue_is_asked_for_room_by_one_job_at_a_time(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(monkeypatch, FULL, FULL, "", FULL)
    chosen = submitter()

    def submit(number: int) -> str:
        return chosen.submit(
            request_, f"job-{number}", [], "", lambda event: None, threading.Event()
        )

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(submit, range(8)))) == 8
    # What all ask for is checked once, and the queue is not looked at.
    assert scheduler.calls[:5] == ["test", "refused", "refused", "taken", "refused"]
    assert scheduler.calls[5:] == ["taken"] * 7


def test_a_full_partition_holds_up_no_job_for_another_one(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(monkeypatch)
    taken, full = threading.Event(), threading.Event()

    def submit(options: list[str], program: str) -> subprocess.CompletedProcess[str]:
        if "--partition=gpu" in options and not taken.is_set():
            full.set()
            return subprocess.CompletedProcess([], 1, "", FULL)
        return subprocess.CompletedProcess([], 0, "1\n", "")

    monkeypatch.setattr(client, "submit", submit)
    chosen = submitter(stages={"train": {"partition": "gpu"}})
    training = request_.model_copy(update={"stage": "train"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            chosen.submit, training, "train", [], "", lambda event: None, threading.Event()
        )
        assert full.wait(60)
        chosen.submit(request_, "other", [], "", lambda event: None, threading.Event())
        assert not waiting.done()
        taken.set()
        assert waiting.result(60) == "1"
    assert scheduler.calls == ["test", "test"]


def test_jobs_that_are_taken_over_are_found_by_one_call_of_squeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    requests = [probe_request(store, message=str(number)) for number in range(20)]
    dead = owner_path(store, "dead")
    scheduler = Scheduler(monkeypatch)
    for number, request in enumerate(requests):
        folder = JobFolder.create(store, new_name(request), request, dead)
        scheduler.queue.append(client.QueuedJob(str(number), "RUNNING", "None", "n1", folder.name))
    runner = SlurmRunner(SlurmSettings(poll_seconds=600))
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(runner.has_running, requests))
    assert scheduler.calls == ["squeue"]


def test_a_full_queue_is_waited_for_while_a_job_in_it_will_make_room(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(monkeypatch, FULL, "", FULL)
    submitted(request_, "after", has_live=False)
    assert scheduler.calls == ["test", "refused", "squeue", "taken"]
    scheduler.queue.clear()
    with pytest.raises(UserError, match="QOSMaxSubmitJobPerUserLimit"):
        submitted(request_, "never", has_live=False)


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
    assert submitted(request_, "mine") == "7"
    assert scheduler.calls == ["test", "squeue"], "no second one, whatever else was not answered"


def interrupt(event: Event) -> None:
    """Ends a runner's wait by the first thing that it says."""
    assert isinstance(event, Log)
    raise KeyboardInterrupt(event.message)


def test_a_job_that_another_orchestrator_is_submitting_is_waited_for(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore.open(request_.store)
    scheduler = Scheduler(monkeypatch)
    other = owner_path(store, "other")
    lease = FileLease(other)
    lease.acquire()
    JobFolder.create(store, new_name(request_), request_, other)
    runner = SlurmRunner(SlurmSettings(poll_seconds=600))
    with pytest.raises(KeyboardInterrupt, match="computed by a job of another run"):
        runner.run(request_, interrupt)
    lease.release()
    assert "taken" not in scheduler.calls


def test_a_job_that_was_submitted_after_the_last_look_at_the_queue_is_found(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore.open(request_.store)
    scheduler = Scheduler(monkeypatch)
    runner = SlurmRunner(SlurmSettings(poll_seconds=600))
    for key in ("1", "2"):
        request = request_.model_copy(update={"key": key * 64})
        folder = JobFolder.create(store, new_name(request), request, owner_path(store, "dead"))
        # Times of files are coarse on some systems: a tick may lie before the last look.
        os.utime(folder.path / REQUEST_FILE, (time.time() + 1,) * 2)
        scheduler.queue.append(client.QueuedJob(key, "PENDING", "None", "", folder.name))
        assert runner.has_running(request)


def test_a_job_that_was_told_to_end_is_not_taken_over(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore.open(request_.store)
    scheduler = Scheduler(monkeypatch)
    folder = JobFolder.create(store, new_name(request_), request_, owner_path(store, "dead"))
    scheduler.queue.append(client.QueuedJob("7", "PENDING", "None", "", folder.name))
    assert SlurmRunner(SlurmSettings()).has_running(request_)
    folder.ask_to_stop()
    assert not SlurmRunner(SlurmSettings()).has_running(request_)


def test_a_folder_into_which_another_run_writes_goes_all_the_same(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a folder would end every later run over the store."""
    store = LocalStore.open(request_.store)
    folder = JobFolder.create(store, "job", request_, owner_path(store, "dead"))
    rmtree = shutil.rmtree

    def and_meanwhile(place: Path, **how: bool) -> None:
        folder.ask_to_stop()
        rmtree(place, **how)

    monkeypatch.setattr(shutil, "rmtree", and_meanwhile)
    folder.remove()
    assert list(job_folders(store)) == []
    assert not folder.path.exists()


def test_a_job_of_an_orchestrator_that_died_while_it_called_sbatch_ends_itself(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore.open(request_.store)
    Scheduler(monkeypatch)
    runner = SlurmRunner(SlurmSettings(poll_seconds=600))
    with pytest.raises(KeyboardInterrupt):
        runner.run(request_.model_copy(update={"key": "0" * 64}), interrupt)
    late = JobFolder.create(store, new_name(request_), request_, owner_path(store, "dead"))
    with pytest.raises(KeyboardInterrupt, match=r"job \d+: geb-"):
        runner.run(request_, interrupt)
    program = batch_program(
        request_,
        SlurmSettings(),
        request_file="request.json",
        folder=late.path,
        interpreter=sys.executable,
        grace_seconds=30,
    )
    done = subprocess.run(["bash"], input=program, text=True, capture_output=True, check=False)
    status = late.status()
    assert status is not None
    assert (done.returncode, status.code) == (143, 143)


def test_a_run_that_stops_submits_none_of_the_jobs_that_wait_their_turn(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(monkeypatch)
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(StoppedError):
        submitter().submit(request_, "late", [], "", lambda event: None, stopping)
    assert scheduler.calls == []
