"""A Slurm job that is followed without a cluster: what Slurm says, and what the job writes."""

import pytest

from flows.pipeline.placement import Execution
from flows.runners.ending import Ending
from flows.runners.place import PlaceAwayError
from flows.runners.slurm import client, work
from flows.runners.slurm.work import SlurmJob, Status, Tail
from stages.contract.events import Log
from tests.flows.runners.stage_jobs import job_of


class Clock:
    """Time that passes while a job is waited for, and never otherwise."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(work, "time", clock)
    return clock


@pytest.fixture
def cancelled(monkeypatch):
    """Numbers of the jobs that were cancelled."""
    numbers = []
    monkeypatch.setattr(client, "cancel", lambda number, option="": numbers.append(number))
    return numbers


def slurm_job(folder, request, look, monkeypatch):
    """A job in a folder, whose state Slurm tells as ``look`` does."""
    fields = {"NodeList": "node1"}
    monkeypatch.setattr(client, "details", lambda number: fields | {"JobState": look()})
    job = job_of(request)
    return SlurmJob("12", folder, job, Execution()), job.log


@pytest.mark.parametrize("silent_seconds", [0, 40])
def test_a_running_job_is_followed_after_a_wrong_answer(
    tmp_path, request_, clock, monkeypatch, silent_seconds
):
    def look():
        if 0 < clock.now < silent_seconds:
            raise PlaceAwayError("the controller does not answer")
        if clock.now > 60:
            (tmp_path / "status").write_text(Status(code=1).model_dump_json())
            return "FAILED"
        return "RUNNING" if clock.now else ""

    job, _ = slurm_job(tmp_path, request_, look, monkeypatch)
    assert job.follow() == Ending("exited", 1)


def test_a_status_that_comes_late_tells_the_end(tmp_path, request_, clock, monkeypatch):
    def look():
        if clock.now > 30:
            (tmp_path / "status").write_text(Status(code=1).model_dump_json())
        clock.sleep(15)
        return "FAILED"

    job, _ = slurm_job(tmp_path, request_, look, monkeypatch)
    assert job.follow() == Ending("exited", 1)


def test_a_job_without_a_status_is_cancelled(tmp_path, request_, clock, cancelled, monkeypatch):
    job, _ = slurm_job(tmp_path, request_, str, monkeypatch)
    assert job.follow().kind == "failed"
    job.remove()
    assert cancelled == ["12"]


def test_a_slow_controller_is_left_alone_between_two_looks(tmp_path, request_, clock, monkeypatch):
    ends = []

    def look():
        if ends:
            raise KeyboardInterrupt
        clock.sleep(15)
        ends.append(clock.now)
        return "RUNNING"

    with pytest.raises(KeyboardInterrupt):
        slurm_job(tmp_path, request_, look, monkeypatch)[0].follow()
    assert clock.now >= ends[0] + work.POLL_SECONDS


@pytest.mark.parametrize("printed", ["cannot start python", ""])
def test_srun_is_quoted_where_the_stage_says_nothing(
    tmp_path, request_, clock, monkeypatch, printed
):
    (tmp_path / "log").write_text(printed)
    (tmp_path / "slurm.out").write_text("srun: error: task 0: Exited\n")
    (tmp_path / "status").write_text(Status(code=127).model_dump_json())
    job, log = slurm_job(tmp_path, request_, lambda: "FAILED", monkeypatch)
    job.follow()
    assert list(log.lines) == [printed or "srun: error: task 0: Exited"]


def test_a_file_that_grows_is_read_by_whole_lines(tmp_path):
    path = tmp_path / "events"
    tail = Tail(path)
    assert list(tail.new_lines()) == []
    path.write_text("one\ntw")
    assert list(tail.new_lines()) == ["one\n"]
    with path.open("a") as file:
        file.write("o\nthree")
    assert list(tail.new_lines()) == ["two\n"]
    assert list(tail.new_lines(last=True)) == ["three"]
    # Line ends within the text of an event end no line.
    event = Log(message="a\u2028b\x85c").model_dump_json() + "\n"
    path.write_text(event)
    assert list(Tail(path).new_lines()) == [event]


def test_a_line_that_never_ends_is_read_once(tmp_path):
    path = tmp_path / "log"
    bar = " 50%" * 1_000_000
    path.write_text(bar)
    tail = Tail(path)
    assert list(tail.new_lines()) == [bar]
    assert list(tail.new_lines()) == []
