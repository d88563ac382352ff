"""`geb status` and `geb logs` over runs in every state."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.commands.cli import app
from flows.execution.observer import Session
from flows.execution.run_record import (
    RunAttempt,
    RunRecord,
    recorded_run_attempt,
    run_attempts,
)
from flows.iterate import run_steps
from flows.pipeline.algorithm import resolve_run, unread_steps
from flows.pipeline.loading import load_config
from flows.report.summary import summarise
from stages.contract.errors import GebError, RunCancelledError, StoppedError, StoreError, UserError
from stages.store.base import Store
from tests.flows.loop import geb_ok, geb_refused, write_config
from tests.flows.records import recorded
from tests.stage_calls import checkpoint_artifact

OLD = time.time() - 3600


@pytest.fixture
def record(tmp_path):
    """A run that has a configuration and nothing else."""
    record = RunRecord(Store.in_folder(str(tmp_path / "store"), create=True), "small")
    record.save_config(load_config(write_config(tmp_path)))
    return record


def shown(record, *arguments):
    words = [*arguments, "--store", record.store.location]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def told(record):
    """The run's state as `geb status --json` has it."""
    return json.loads(shown(record, "status", record.name, "--json"))[record.name]


def note(record, step, state, message=""):
    now = time.time()
    ended = None if state == "running" else now + 2
    stage = step.split("/")[1 if "/" in step else 0]
    values = {"state": state, "message": message, "started": now, "ended": ended}
    return recorded(record, step, stage=stage, **values)


def test_a_store_that_fails_hides_no_error_of_the_run(record, monkeypatch):
    def fail(store, path):
        raise StoreError("the bucket does not answer")

    with pytest.raises(GebError, match="the run's own"), recorded_run_attempt(record):
        monkeypatch.setattr(Store, "share", fail)
        raise GebError("the run's own")


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "completed"),
        (GebError("no"), "failed"),
        (RunCancelledError("by a person"), "cancelled"),
        (KeyboardInterrupt(), "stopped"),
        (StoppedError("train: stopped"), "stopped"),
    ],
)
def test_a_run_s_state_is_how_its_last_attempt_ended(record, error, state):
    with pytest.raises(GebError), recorded_run_attempt(record):
        raise GebError("the attempt before")
    try:
        with recorded_run_attempt(record):
            assert "running" in shown(record, "status")
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    status = told(record)
    assert status["state"] == state
    assert [attempt["state"] for attempt in status["attempts"]] == ["failed", state]
    assert state in shown(record, "status")


def test_one_of_two_simultaneous_different_runs_is_refused(record):
    second = record.config().model_copy(update={"seed": 1})

    def run_second():
        with recorded_run_attempt(record, lambda: record.start(second, {})):
            pass

    def begin_first():
        record.start(record.config(), {})
        futures.append(pool.submit(run_second))
        with pytest.raises(TimeoutError):
            futures[0].result(0.5)

    futures = []
    with (
        ThreadPoolExecutor() as pool,
        recorded_run_attempt(record, begin_first),
        pytest.raises(UserError, match="is at work"),
    ):
        futures[0].result()
    assert record.config().seed == 0


def test_what_a_run_at_work_may_read_is_not_computed_again(record):
    with recorded_run_attempt(record), pytest.raises(UserError, match="is at work"):
        record.start(record.config(), {"iteration-1/train": ""})


def test_a_refused_run_leaves_the_report_to_the_one_at_work(record):
    second = resolve_run(record.config().model_copy(update={"seed": 1}))
    refused = pytest.raises(UserError, match="is at work")
    with recorded_run_attempt(record), refused as caught:
        run_steps(second, Session())
    assert not (record.path / "report.html").exists()
    assert not hasattr(caught.value, "__notes__"), "nothing to resume"


def test_a_run_and_step_without_a_process_have_crashed(record):
    dead = RunAttempt(id="1", state="running", started=OLD, host=socket.gethostname(), pid=1)
    (record.path / "attempts").mkdir()
    (record.path / "attempts/1.json").write_text(dead.model_dump_json())
    begun = note(record, "iteration-1/train", "running")
    record.save_step(begun.model_copy(update={"started": OLD + 0.1}))
    status = told(record)
    assert status["state"] == "crashed"
    assert [step["state"] for step in status["steps"]] == ["crashed"]
    elsewhere = dead.model_copy(update={"host": "another", "started": OLD + 1})
    (record.path / "attempts/2.json").write_text(elsewhere.model_dump_json())
    assert run_attempts(record)[-1].state == "running", "of another host's process nothing is known"


@pytest.mark.parametrize(
    ("prepare", "states"),
    [("0", {"done"}), ("1", {"outdated"})],
    ids=["the same file", "another content"],
)
def test_another_content_of_a_file_outdates_all_that_came_of_it(record, prepare, states):
    for step in ("prepare", "iteration-1/train"):
        recorded(record, step)
    # A key that is not known before the step begins says nothing.
    keys = {"prepare": prepare * 64, "iteration-1/train": None}
    record.start(record.config(), keys)
    assert {step.state for step in record.steps()} == states


@pytest.mark.parametrize(("state", "counts"), [("done", True), ("outdated", False)])
def test_an_outdated_step_did_not_make_the_run_s_results(record, state, counts):
    artifact = checkpoint_artifact(record.store, "weights")
    recorded(record, "prepare", stage="train", key=artifact.manifest.key, state=state)
    assert ("prepare" in summarise(record).artifacts) is counts


def test_steps_of_earlier_attempts_wait_and_all_steps_count(record):
    note(record, "prepare", "done")
    time.sleep(0.01)
    with recorded_run_attempt(record):
        note(record, "sft", "done")
        note(record, "iteration-1/train", "failed", "out of memory\nsecond line")
        # Ended after the attempt began, unlike the first.
        first = record.step("prepare")
        record.save_step(first.model_copy(update={"started": OLD, "ended": OLD}))
        status = told(record)
        text = shown(record, "status", "small")
    assert status["done"] == 1
    assert status["of"] == len(unread_steps(record.config())) == 12
    assert "prepare" in status["waiting"]
    assert "1 of 12 steps" in text
    assert "iteration-1/train: out of memory" in text
    assert re.search(r"started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+", text), "with its time zone"


def test_logs_show_the_step_and_the_place_of_the_file(finished):
    store = finished.parent / "store"
    done = geb_ok("logs", "small", "iteration-1/train", "--store", store)
    head, *lines = done.stdout.splitlines()
    path = Path(head.rpartition(", ")[2])
    assert path.read_bytes().count(b"\n") == len(lines), "a progress bar is one line"
    assert any("pairs" in line for line in lines)
    wrong = geb_refused("logs", "small", "iteration-9/train", "--store", store)
    assert "iteration-1/train" in wrong


def test_logs_without_a_step_show_the_failed_step(record):
    with pytest.raises(GebError), recorded_run_attempt(record):
        note(record, "sft", "done")
        failed = note(record, "iteration-1/train", "failed")
        folder = record.store.root / "logs" / failed.stage / failed.key
        folder.mkdir(parents=True)
        (folder / "20260101-000000-1-1.log").write_text("first\n")
        (folder / "20260102-000000-1-1.log").write_text("bar 1 %\rbar 100 %\nthe last word")
        raise GebError("no")
    text = shown(record, "logs", "small")
    assert "iteration-1/train failed, attempt 2" in text
    assert text.splitlines()[1:] == ["bar 100 %", "the last word"]


def test_an_overview_of_runs_asks_a_bucket_once_for_all(record, monkeypatch):
    for name in ("small", "second", "third"):
        run = RunRecord(record.store, name)
        run.save_config(record.config().model_copy(update={"name": name}))
        with recorded_run_attempt(run):
            note(run, "prepare", "reused")
    refreshed = []

    def refresh(store, folder):
        refreshed.append(folder)

    monkeypatch.setattr(Store, "refresh", refresh)
    text = shown(record, "status")
    assert all(re.search(rf"{name} +completed +1/12", text) for name in ("small", "second"))
    assert refreshed == ["runs"]
