"""Trackers of a run: one session each, with the real packages in their offline modes."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.placement import Execution
from flows.report.summary import Summary
from flows.report.table import SuiteFigures
from flows.tracking import sessions
from flows.tracking.sessions import tracked
from flows.tracking.updates import updates
from stages.contract.local_store import LocalStore
from stages.contract.store import Artifact
from tests.flows.evaluations import artifact_in
from tests.flows.loop import ROOT, geb, write_config
from tests.lacking import lacking

# As `make setup-trackers` makes it.
PYTHON = Path(os.environ.get("GEB_TRACKERS_PYTHON", ROOT / ".venv-trackers/bin/python"))


def summary_of(config: RunConfig, folder: Path, done: int) -> Summary:
    """A run after some iterations: the reward is 0.5 and grows by 0.1 in each."""
    artifacts: dict[str, Artifact] = {}
    rows = [{"iteration": 0}]
    for t in range(1, config.iterations + 1):
        rows.append(
            {"iteration": t, "intervals": {"mean_reward": (t / 10, t)}, "solved": {"accuracy": 0.5}}
        )
        if t > done:
            continue
        metrics = {"mean_reward": 0.5 + t / 10, "base_mean_reward": 0.5, "reward_components": {}}
        sampled = {"mean_reward": 0.4, "mean_response_tokens": 9.0, "pairs": 8, "std_reward": None}
        steps = [{"step": step, "loss": 1 / step} for step in (1, 2)]
        files: dict[str, dict[str, str]] = {
            "evaluate": {"metrics.json": json.dumps(metrics)},
            "pair": {"metrics.json": json.dumps(sampled)},
            "train": {
                "summary.json": json.dumps({"metrics": {"loss": 0.25}}),
                "metrics.jsonl": "".join(json.dumps(each) + "\n" for each in steps),
            },
            "promote": {
                "decision.json": json.dumps({"promoted": True, "aliases": ["best"], "gates": []}),
                "registry.json": json.dumps({"version": t, "aliases": {"best": t}}),
            },
        }
        for stage, texts in files.items():
            place = folder / f"{t}-{stage}"
            place.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (place / name).write_text(text)
            artifacts[f"iteration-{t}/{stage}"] = artifact_in(place)
    return Summary("tracked", config, str(folder), artifacts=artifacts, rows=rows)


class Run:
    """A run of two iterations with one tracker."""

    def __init__(self, folder: Path, tracker: str, interpreter: Path) -> None:
        self.folder = folder
        self.config = RunConfig.model_validate(
            {
                "name": "tracked",
                "iterations": 2,
                "tracking": {"report_to": [tracker]},
                "execution": {"interpreters": {"trackers": str(interpreter)}},
            }
        )
        store = LocalStore.open(str(folder / "store"), create=True)
        self.record = RunRecord(store, "tracked")
        self.warnings: list[str] = []

    def attempt(self, done: int, *, fails: bool) -> None:
        """Goes on to some iteration, and fails there or finishes."""
        found = summary_of(self.config, self.folder / "artifacts", done)
        try:
            with tracked(self.config, self.record, self.warnings.append) as trackers:
                trackers.update(found)
                if fails:
                    raise InterruptedError
                trackers.finish(found, "report.html")
        except InterruptedError:
            assert fails


def test_updates_are_those_of_the_iterations_that_are_done(tmp_path: Path) -> None:
    config = RunConfig(name="tracked", iterations=2)
    [base, trained, first] = updates(summary_of(config, tmp_path, done=1))
    assert base.points == [(0, {"evaluation/mean_reward": 0.5})]
    assert [(step, each["train/loss"]) for step, each in trained.points] == [(1, 1.0), (2, 0.5)]
    assert first.points == [
        (
            1,
            {
                "generation/mean_response_tokens": 9.0,
                "reward/mean_reward": 0.4,
                "pairs/pairs": 8.0,
                "evaluation/mean_reward": 0.6,
                "evaluation/mean_reward/low": 0.1,
                "evaluation/mean_reward/high": 1.0,
                "evaluation/accuracy": 0.5,
                "training/loss": 0.25,
                "promotion/promoted": 1.0,
            },
        )
    ]
    found = summary_of(config, tmp_path, done=2)
    row = {
        "iteration": 2,
        "mean_reward": 0.3,
        "components": {"style": 0.7},
        "solved": {"accuracy": 0.5},
        "intervals": {"mean_reward": (0.2, 0.4), "components.style": (0.6, 0.8)},
    }
    found.suites = [SuiteFigures("math", [row])]
    *_, trained, second = updates(found)
    [(_, values)] = second.points
    assert {name: value for name, value in values.items() if name.startswith("suites/")} == {
        "suites/math/mean_reward": 0.3,
        "suites/math/mean_reward/low": 0.2,
        "suites/math/mean_reward/high": 0.4,
        "suites/math/accuracy": 0.5,
        "suites/math/reward_components/style": 0.7,
        "suites/math/reward_components/style/low": 0.6,
        "suites/math/reward_components/style/high": 0.8,
    }
    # Counted on from the iteration before.
    assert [step for step, _ in trained.points] == [3, 4]
    assert second.axis == "iteration"


@pytest.mark.parametrize(
    "tracker",
    [
        "tensorboard",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlflow", "trackio", "wandb")),
    ],
)
def test_a_run_that_goes_on_continues_its_session_and_sends_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    # As long as a busy machine needs.
    monkeypatch.setattr(sessions, "_LAST_SECONDS", 600.0)
    for name in ("WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    interpreter = Path(sys.executable) if tracker == "tensorboard" else PYTHON
    if not interpreter.exists():
        lacking(f"no interpreter at {interpreter}: run `make setup-trackers`")
    run = Run(tmp_path, tracker, interpreter)
    run.attempt(1, fails=True)
    run.attempt(2, fails=False)
    # Everything is there: no process is started for it.
    run.config = run.config.model_copy(
        update={"execution": Execution(interpreters={"trackers": "/nowhere"})}
    )
    run.attempt(2, fails=False)
    assert run.warnings == []
    curves, texts, count = READERS[tracker](tmp_path / "store/trackers")
    assert count == 1
    assert curves["evaluation/mean_reward"] == [(0, 0.5), (1, 0.6), (2, 0.7)]
    assert curves["reward/mean_reward"] == [(1, 0.4), (2, 0.4)]
    assert curves["train/loss"] == [(1, 1.0), (2, 0.5), (3, 1.0), (4, 0.5)]
    for each in ("tracked:2", "tracked@best", "report.html"):
        assert each in texts


Found = tuple[dict[str, list[tuple[int, float]]], str, int]


def read_tensorboard(place: Path) -> Found:
    from tensorboardX.proto.event_pb2 import Event

    curves: dict[str, list[tuple[int, float]]] = {}
    texts = ""
    for path in sorted(place.glob("tensorboard/tracked/events.*")):
        content = path.read_bytes()
        while content:
            # Length, its checksum, the event, its checksum.
            (length,) = struct.unpack_from("<Q", content)
            event = Event.FromString(content[12 : 12 + length])
            content = content[length + 16 :]
            for value in event.summary.value:
                point = (event.step, round(value.simple_value, 6))
                curves.setdefault(value.tag, []).append(point)
                texts += "".join(each.decode() for each in value.tensor.string_val)
    return curves, texts, len(list(place.glob("tensorboard/*")))


def read_mlflow(place: Path) -> Found:
    with contextlib.closing(sqlite3.connect(place / "mlflow/mlflow.db")) as database:
        curves: dict[str, list[tuple[int, float]]] = {}
        for name, step, value in database.execute(
            "select key, step, value from metrics order by step"
        ):
            curves.setdefault(name, []).append((step, value))
        texts = " ".join(value for (value,) in database.execute("select value from tags"))
        states = database.execute("select status from runs").fetchall()
    assert states == [("FINISHED",)]
    return curves, texts, len(states)


def read_trackio(place: Path) -> Found:
    with contextlib.closing(sqlite3.connect(place / "trackio/geb.db")) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
        [(sessions,)] = database.execute("select count(distinct run_id) from metrics").fetchall()
    return _curves((step, json.loads(metrics)) for step, metrics in rows), str(rows), sessions


def read_wandb(place: Path) -> Found:
    # By wandb's own messages, which its environment has.
    program = f"""
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
for path in sorted(Path({str(place)!r}).glob("wandb/offline-run-*/*.wandb")):
    content = path.read_bytes()
    start, whole = 7, b""
    while start + 7 <= len(content):
        # A log of blocks of 32 KiB; a record may go on in the next one.
        if 32768 - start % 32768 < 7:
            start += 32768 - start % 32768
        _, length, kind = struct.unpack_from("<IHB", content, start)
        whole += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):
            record, whole = Record.FromString(whole), b""
            items = getattr(record, record.WhichOneof("record_type"))
            if record.HasField("run"):
                print(json.dumps(["run", record.run.run_id]))
            if record.HasField("history") or record.HasField("summary"):
                named = items.item if record.HasField("history") else items.update
                values = {{each.key or "/".join(each.nested_key): json.loads(each.value_json)
                           for each in named}}
                print(json.dumps([record.WhichOneof("record_type"), values]))
"""
    done = subprocess.run(
        [PYTHON, "-c", program], capture_output=True, text=True, check=True, cwd=place
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    history = [values for kind, values in records if kind == "history"]
    points = ((each.get("iteration", each.get("train/step")), each) for each in history)
    runs = {name for kind, name in records if kind == "run"}
    return _curves(points), done.stdout, len(runs)


def _curves(rows: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, values in rows:
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves


READERS: dict[str, Callable[[Path], Found]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


@pytest.mark.parametrize(
    ("program", "says"),
    [
        # Never answers, and ends when its input does.
        ("cat > /dev/null", "it has not taken everything 0.1 s after the run"),
        ("exit 3", "its process has ended"),
        ("""echo '{"error": "no login"}'""", "no login"),
    ],
    ids=["hangs", "crashes", "refuses"],
)
def test_a_tracker_that_fails_costs_one_warning_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    monkeypatch.setattr(sessions, "_LAST_SECONDS", 0.1 if "cat" in program else 60.0)
    run = Run(tmp_path, "wandb", write_program(tmp_path, program))
    run.attempt(2, fails=False)
    [warning] = run.warnings
    assert warning.startswith(f"tracker wandb: {says}")


def test_a_tracker_that_is_not_installed_is_refused_by_the_plan(tmp_path: Path) -> None:
    # A Python without any package.
    bare = write_program(tmp_path, f'exec {sys.executable} -I -S "$@"')
    done = geb(
        *("plan", write_config(tmp_path), "--set", "tracking.report_to=[wandb, mlflow]"),
        *("--set", f"execution.interpreters.trackers={bare}"),
    )
    assert done.returncode == 64
    assert f"tracking.report_to: no wandb, mlflow in the environment of {bare}" in done.stderr
    assert "make setup-trackers" in done.stderr


def write_program(folder: Path, text: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
