"""Trackers of a run: one session each, with the real packages in their offline modes."""

import contextlib
import json
import os
import sqlite3
import struct
import sys
import threading
from typing import ClassVar

import pytest

from flows import tracking
from flows.execution.plan import plan
from flows.execution.run_record import RunRecord
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.report.summary import Summary
from flows.tracking import news_of, tracked
from stages.contract.errors import StoreError, UserError
from stages.store.base import Store
from tests.flows.loop import ROOT, geb_ok, write_config
from tests.flows.report.evaluations import artifact_in, figure_row
from tests.programs import lacking, run_program

# As `make setup-trackers` makes it.
PACKAGES = ROOT / ".venv-trackers"


def summary_of(config, folder, done):
    """A run after some iterations: the reward is 0.5 and grows by 0.1 in each."""
    artifacts = {}
    rows = [figure_row(0, mean_reward=0.5, **{"pass@16": 0.9})]
    for t in range(1, config.iterations + 1):
        reward = 0.5 + t / 10
        rows.append(figure_row(t, mean_reward=reward, accuracy=0.5))
        sampled = {"mean_reward": 0.4, "mean_response_tokens": 9.0, "pairs": 8, "std_reward": None}
        steps = [{"step": step, "loss": 1 / step} for step in (1, 2)]
        texts = {
            "pair/metrics.json": json.dumps(sampled),
            "promote/decision.json": "{}",
            "train/metrics.jsonl": "\n".join(map(json.dumps, steps)),
        }
        for place, text in texts.items() if t <= done else ():
            path = folder / f"{t}" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            artifacts[f"iteration-{t}/{path.parent.name}"] = artifact_in(path.parent)
    return Summary("tracked", config, str(folder), artifacts=artifacts, rows=rows)


# Goes on to an iteration, and fails there or finishes; the packages come last on the path.
ATTEMPT = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tests.flows.test_tracking import attempt
attempt(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), fails=sys.argv[5] == "fails")
"""


def attempt(folder, tracker, done, *, fails=False, **changes):
    """One attempt at a run of two iterations with one tracker; returns the warnings."""
    settings = {"name": "tracked", "iterations": 2, "tracking": {"report_to": [tracker]}} | changes
    config = RunConfig.model_validate(settings)
    record = RunRecord(Store.in_folder(str(folder / "store"), create=True), "tracked")
    record.path.mkdir(parents=True, exist_ok=True)
    summary = summary_of(config, folder / "artifacts", done)
    warnings = []
    with contextlib.suppress(InterruptedError), tracked(config, record, warnings.append) as track:
        track(summary)
        if fails:
            raise InterruptedError
        track(summary)
    return warnings


def test_news_cover_the_finished_iterations(tmp_path):
    config = RunConfig(name="tracked", iterations=2)
    news = news_of(summary_of(config, tmp_path, done=1))
    assert list(news) == ["iteration-0", "iteration-1/train", "iteration-1"]
    _, steps = news["iteration-1/train"]
    assert [(step, values["train/loss"]) for step, values in steps] == [(1, 1.0), (2, 0.5)]
    values = {
        "evaluation/mean_reward": 0.6,
        "evaluation/accuracy": 0.5,
        "samples/mean_reward": 0.4,
        "samples/mean_response_tokens": 9.0,
        "samples/pairs": 8.0,
    }
    assert news["iteration-1"] == ("iteration", [(1, values)])
    summary = summary_of(config, tmp_path, done=2)
    summary.suites["math"] = [figure_row(2, mean_reward=0.3, **{"components.style": 0.7})]
    news = news_of(summary)
    [(step, values)] = news["iteration-2"][1]
    assert step == 2
    assert values["suites/math/mean_reward"] == 0.3
    assert values["suites/math/components.style"] == 0.7
    # Counted on from the iteration before.
    assert [step for step, _ in news["iteration-2/train"][1]] == [3, 4]


@pytest.mark.parametrize(
    "tracker",
    [
        "tensorboard",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlflow", "trackio", "wandb")),
    ],
)
def test_a_resumed_run_continues_its_session_without_repeats(tmp_path, tracker):
    packages = next(PACKAGES.glob("lib/python3*/site-packages"), None)
    if packages is None and tracker != "tensorboard":
        lacking(f"no packages at {PACKAGES}: run `make setup-trackers`")
    names = ("WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_DIR")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    for done, end in ((1, "fails"), (2, "ends"), (2, "ends")):
        command = (sys.executable, "-c", ATTEMPT, packages, tmp_path, tracker, str(done), end)
        finished = run_program(*command, env=environment, cwd=ROOT)
        assert finished.returncode == 0, finished.stderr
    place = tmp_path / "store/trackers"
    if tracker == "wandb":
        # The rest is in wandb's own format.
        runs = {folder.name.rpartition("-")[2] for folder in place.glob("wandb/offline-run-*")}
        assert len(runs) == 1
        return
    points, texts, count = READERS[tracker](place)
    assert count == 1
    assert "tracked" in texts
    curves = {}
    for name, step, value in points:
        curves.setdefault(name, []).append((step, value))
    assert curves["evaluation/mean_reward"] == [(0, 0.5), (1, 0.6), (2, 0.7)]
    [name] = [name for name in curves if name.startswith("evaluation/pass")]
    assert curves[name] == [(0, 0.9)]
    assert curves["train/loss"] == [(1, 1.0), (2, 0.5), (3, 1.0), (4, 0.5)]


def test_a_finished_run_sends_the_rest_when_it_is_resumed(copied):
    store = copied.parent / "store"
    record = RunRecord.existing(Store.in_folder(str(store)), "small")
    values = record.config().to_values() | {"tracking": {"report_to": ["tensorboard"]}}
    record.save_config(RunConfig.model_validate(values))
    geb_ok("resume", "small", "--store", store)
    points, _, count = read_tensorboard(store / "trackers", "small")
    assert count == 1
    assert "evaluation/mean_reward" in {name for name, _, _ in points}


def read_tensorboard(place, run="tracked"):
    from tensorboardX.proto.event_pb2 import Event

    points, texts = [], ""
    for path in sorted(place.glob(f"tensorboard/{run}-*/events.*")):
        content = path.read_bytes()
        while content:
            # Length, its checksum, the event, its checksum.
            (length,) = struct.unpack_from("<Q", content)
            event = Event.FromString(content[12 : 12 + length])
            content = content[length + 16 :]
            for value in event.summary.value:
                points.append((value.tag, event.step, round(value.simple_value, 6)))
                texts += "".join(text.decode() for text in value.tensor.string_val)
    return points, texts, len(list(place.glob("tensorboard/*")))


def read_mlflow(place):
    with contextlib.closing(sqlite3.connect(place / "mlflow.db")) as database:
        points = database.execute("select key, step, value from metrics order by step").fetchall()
        texts = str(database.execute("select value from params").fetchall())
        states = database.execute("select status from runs").fetchall()
    assert states == [("FINISHED",)]
    return points, texts, len(states)


def read_trackio(place):
    with contextlib.closing(sqlite3.connect(place / "trackio/geb.db")) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
        configurations = database.execute("select config from configs").fetchall()
        [(sessions,)] = database.execute("select count(distinct run_id) from metrics").fetchall()
    points = [
        (name, step, value) for step, text in rows for name, value in json.loads(text).items()
    ]
    return points, str(configurations), sessions


# Each gives points by name and step, texts, and the number of sessions.
READERS = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


class Session:
    id = "first"
    given: ClassVar[list[str | None]] = []

    def __init__(self, *arguments):
        self.given.append(arguments[-1])

    def log(self, *_): ...

    def close(self, _): ...


def test_other_settings_begin_another_session(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_SESSIONS", {"tensorboard": Session})
    attempt(tmp_path, "tensorboard", 1)
    attempt(tmp_path, "tensorboard", 2, execution={"parallel": 2})
    attempt(tmp_path, "tensorboard", 2, train={"beta": 0.07})
    both = {"report_to": ["tensorboard"], "project": "another"}
    attempt(tmp_path, "tensorboard", 2, train={"beta": 0.07}, tracking=both)
    assert Session.given == [None, "first", None, None]


def test_an_outage_of_the_bucket_opens_no_second_session(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_SESSIONS", {"tensorboard": Session})
    monkeypatch.setattr(Session, "given", [])

    def away(*_):
        raise StoreError("away")

    with monkeypatch.context() as patch:
        patch.setattr(RunRecord, "write", away)
        [warning] = attempt(tmp_path, "tensorboard", 1)
    assert "away" in warning
    attempt(tmp_path, "tensorboard", 2)
    assert Session.given == [None, "first"]


class Refusing:
    def __init__(self, *_):
        raise ConnectionError("no login")


class Hanging:
    def __init__(self, *_):
        threading.Event().wait()


@pytest.mark.parametrize(
    ("session", "message"),
    [
        (Refusing, "tracker tensorboard: ConnectionError: no login; `geb resume` sends the rest"),
        (Hanging, "tracker tensorboard: not everything is sent 0.1 s after the run"),
    ],
)
def test_a_tracker_that_fails_costs_one_warning_that_names_it(
    tmp_path, monkeypatch, session, message
):
    monkeypatch.setattr(tracking, "_SESSIONS", {"tensorboard": session})
    monkeypatch.setattr(tracking, "_LAST_SECONDS", 0.1 if session is Hanging else 60.0)
    [warning] = attempt(tmp_path, "tensorboard", 2)
    assert warning.startswith(message)


def test_a_tracker_that_is_not_installed_is_refused_by_the_plan(tmp_path, monkeypatch):
    there = {"torch": object()}
    monkeypatch.setattr("flows.pipeline.preflight.find_spec", there.get)
    config = load_config(write_config(tmp_path), ["tracking.report_to=[wandb, tensorboard]"])
    with pytest.raises(UserError, match="wandb is not installed") as caught:
        plan(resolve_run(config))
    assert "pip install wandb" in caught.value.remedy
