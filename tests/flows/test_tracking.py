"""Trackers of a run: one session each, with the real packages in their offline modes."""

import contextlib
import json
import os
import sqlite3
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.placement import Execution
from flows.report.summary import Summary
from flows.report.table import SuiteFigures
from flows.tracking import sessions
from flows.tracking.sessions import tracked
from flows.tracking.updates import updates
from stages.store.base import Artifact, Store
from tests.flows.evaluations import artifact_in
from tests.flows.loop import ROOT, geb_refused, write_config, write_program
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
        evaluated = {"mean_reward": 0.5 + t / 10, "base_mean_reward": 0.5, "reward_components": {}}
        sampled = {"mean_reward": 0.4, "mean_response_tokens": 9.0, "pairs": 8, "std_reward": None}
        files = {
            "evaluate/metrics.json": evaluated,
            "pair/metrics.json": sampled,
            "train/summary.json": {"metrics": {"loss": 0.25}},
            "promote/decision.json": {"promoted": True, "aliases": ["best"], "gates": []},
            "promote/registry.json": {"version": t, "aliases": {"best": t}},
        }
        texts = {place: json.dumps(each) for place, each in files.items()}
        steps = [{"step": step, "loss": 1 / step} for step in (1, 2)]
        texts["train/metrics.jsonl"] = "\n".join(map(json.dumps, steps))
        for place, text in texts.items() if t <= done else ():
            path = folder / f"{t}" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            artifacts[f"iteration-{t}/{path.parent.name}"] = artifact_in(path.parent)
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
        store = Store.open(str(folder / "store"), create=True)
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
                trackers.update(found, "report.html")
        except InterruptedError:
            assert fails


def test_updates_are_those_of_the_iterations_that_are_done(tmp_path: Path) -> None:
    config = RunConfig(name="tracked", iterations=2)
    [(_, _, base), (_, _, trained), (_, _, first)] = updates(summary_of(config, tmp_path, done=1))
    assert base == [(0, {"evaluation/mean_reward": 0.5})]
    assert [(step, each["train/loss"]) for step, each in trained] == [(1, 1.0), (2, 0.5)]
    assert first == [
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
    *_, (_, _, trained), (_, axis, [(_, values)]) = updates(found)
    assert axis == "iteration"
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
    assert [step for step, _ in trained] == [3, 4]


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
    place = tmp_path / "store/trackers"
    if tracker == "wandb":
        # The rest is in wandb's own format.
        runs = {each.name.rpartition("-")[2] for each in place.glob("wandb/offline-run-*")}
        assert len(runs) == 1
        return
    points, texts, count = READERS[tracker](place)
    assert count == 1
    curves: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in points:
        curves.setdefault(name, []).append((step, value))
    assert curves["evaluation/mean_reward"] == [(0, 0.5), (1, 0.6), (2, 0.7)]
    assert curves["reward/mean_reward"] == [(1, 0.4), (2, 0.4)]
    assert curves["train/loss"] == [(1, 1.0), (2, 0.5), (3, 1.0), (4, 0.5)]
    for each in ("tracked:2", "tracked@best", "report.html"):
        assert each in texts


# Points by name and step, texts, and the number of sessions.
Found = tuple[list[tuple[str, int, float]], str, int]


def read_tensorboard(place: Path) -> Found:
    from tensorboardX.proto.event_pb2 import Event

    points, texts = [], ""
    for path in sorted(place.glob("tensorboard/tracked/events.*")):
        content = path.read_bytes()
        while content:
            # Length, its checksum, the event, its checksum.
            (length,) = struct.unpack_from("<Q", content)
            event = Event.FromString(content[12 : 12 + length])
            content = content[length + 16 :]
            for value in event.summary.value:
                points.append((value.tag, event.step, round(value.simple_value, 6)))
                texts += "".join(each.decode() for each in value.tensor.string_val)
    return points, texts, len(list(place.glob("tensorboard/*")))


def read_mlflow(place: Path) -> Found:
    with contextlib.closing(sqlite3.connect(place / "mlflow/mlflow.db")) as database:
        points = database.execute("select key, step, value from metrics order by step").fetchall()
        texts = str(database.execute("select value from tags").fetchall())
        states = database.execute("select status from runs").fetchall()
    assert states == [("FINISHED",)]
    return points, texts, len(states)


def read_trackio(place: Path) -> Found:
    with contextlib.closing(sqlite3.connect(place / "trackio/geb.db")) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
        [(sessions,)] = database.execute("select count(distinct run_id) from metrics").fetchall()
    points = [
        (name, step, value) for step, text in rows for name, value in json.loads(text).items()
    ]
    return points, str(rows), sessions


READERS: dict[str, Callable[[Path], Found]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("exec sleep 600", "it has not taken everything 0.1 s after the run"),
        ("cat > /dev/null", "its process has ended and has not taken everything"),
        ("echo no login >&2; exit 3", "its process has ended with exit code 3: no login"),
    ],
    ids=["hangs", "ends", "crashes"],
)
def test_a_tracker_that_fails_costs_one_warning_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    monkeypatch.setattr(sessions, "_LAST_SECONDS", 0.1 if "sleep" in program else 60.0)
    run = Run(tmp_path, "wandb", write_program(tmp_path / "python", program))
    run.attempt(2, fails=False)
    [warning] = run.warnings
    assert warning.startswith(f"tracker wandb: {says}")


def test_a_tracker_that_is_not_installed_is_refused_by_the_plan(tmp_path: Path) -> None:
    # A Python without any package.
    bare = write_program(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')
    said = geb_refused(
        *("plan", write_config(tmp_path), "--set", "tracking.report_to=[wandb, mlflow]"),
        *("--set", f"execution.interpreters.trackers={bare}"),
    )
    assert f"tracking.report_to: no wandb, mlflow in the environment of {bare}" in said
    assert "make setup-trackers" in said
