"""Trackers of a run: Weights & Biases, Trackio, MLflow and TensorBoard (docs/operations.md).

Each tracker works in its own thread. One that fails or hangs costs a warning. The run's folder
has on record what each tracker got, so that a resumed run sends only what is new.
"""

import importlib
import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.placement import PACKAGES, Tracker
from flows.report.summary import Summary
from stages.contract.atomic import write_atomically
from stages.contract.digests import sha256_of

# Time for the trackers to take what is left when the run is over.
_LAST_SECONDS = 60.0
# What changes no figure, and no place of theirs.
_NO_RESULT: dict[str, Any] = {
    **dict.fromkeys(("execution", "resources", "estimation", "store"), True),
    "tracking": {"report_to"},
}
Points = list[tuple[int, dict[str, float]]]
News = dict[str, tuple[str, Points]]


class _Wandb:
    """A run of Weights & Biases, offline by default, or of Trackio, which shares its functions."""

    def __init__(self, package: str, config: RunConfig, folder: Path, session: str | None) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        module = importlib.import_module(package)
        self._is_trackio = package == "trackio"
        options: dict[str, Any] = {"embed": False, "auto_log_gpu": False}
        if not self._is_trackio:
            options = {
                "id": session,
                "dir": str(folder),
                "mode": os.environ.get("WANDB_MODE", "offline"),
                "settings": module.Settings(silent=True, console="off", reinit="create_new"),
            }
        self._run = module.init(
            config=config.to_values(),
            project=config.tracking.project,
            name=config.name,
            resume="allow",
            **options,
        )
        self.id = str(self._run.id)

    def log(self, axis: str, points: Points) -> None:
        for step, values in points:
            self._run.log({axis: step, **values}, step=step if self._is_trackio else None)

    def close(self, ok: bool) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow; in a local SQLite database unless MLFLOW_TRACKING_URI says otherwise."""

    def __init__(self, package: str, config: RunConfig, folder: Path, session: str | None) -> None:
        os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        self._mlflow = importlib.import_module(package)
        self._mlflow.set_experiment(config.tracking.project)
        run = self._mlflow.start_run(run_id=session, run_name=config.name)
        self.id = run.info.run_id
        if session is None:
            self._mlflow.log_params(config.to_values())

    def log(self, axis: str, points: Points) -> None:
        for step, values in points:
            # MLflow refuses all of a step for one name with another character, as in pass@16.
            named = {re.sub(r"[^/\w.\- :]", "_", name): value for name, value in values.items()}
            self._mlflow.log_metrics(named, step=step)

    def close(self, ok: bool) -> None:
        self._mlflow.end_run("FINISHED" if ok else "FAILED")


class _TensorBoard:
    """Event files in ``tensorboard/RUN-TIME``; a resumed run adds a file."""

    def __init__(self, package: str, config: RunConfig, folder: Path, session: str | None) -> None:
        writer = importlib.import_module(package).SummaryWriter
        self.id = session or f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._writer = writer(str(folder / "tensorboard" / self.id))
        self._writer.add_text("configuration", json.dumps(config.to_values(), indent=2))

    def log(self, axis: str, points: Points) -> None:
        for step, values in points:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, ok: bool) -> None:
        self._writer.close()


_SESSIONS: dict[Tracker, Any] = {"mlflow": _Mlflow, "tensorboard": _TensorBoard}


class _Thread(threading.Thread):
    """Sends news to one tracker, whose session it opens with the first ones."""

    def __init__(self, tracker: Tracker, config: RunConfig, record: RunRecord) -> None:
        super().__init__(name=f"tracker-{tracker}", daemon=True)
        self.tracker = tracker
        self.news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self.is_ok = False
        self.failure = ""
        self._config = config
        self._record = record

    def run(self) -> None:
        try:
            self._send(self._record.path / f"tracker-{self.tracker}.json")
        except Exception as error:
            # The run goes on, whatever the error, and warns at its end.
            self.failure = f"{type(error).__name__}: {error}"

    def _send(self, file: Path) -> None:
        digest = sha256_of(self._config.model_dump(mode="json", exclude=_NO_RESULT))
        state = json.loads(file.read_text()) if file.exists() else {}
        if state.get("settings") != digest:
            # Curves of other settings are another session.
            state = {"settings": digest}
        sent = state.setdefault("sent", {})
        session = None
        while (news := self.news.get()) is not None:
            for place, (axis, points) in news.items():
                digest = sha256_of(points)
                if sent.get(place) == digest:
                    continue
                session = session or self._open(state.get("session"))
                session.log(axis, points)
                sent[place] = digest
                state["session"] = session.id
                text = json.dumps(state)
                # Here first: after an outage of the bucket the session still goes on.
                write_atomically(file, text)
                self._record.write(file.name, text)
        if session is not None:
            session.close(self.is_ok)

    def _open(self, session: str | None) -> Any:
        folder = self._record.store.root / "trackers"
        folder.mkdir(exist_ok=True)
        make = _SESSIONS.get(self.tracker, _Wandb)
        return make(PACKAGES[self.tracker], self._config, folder, session)


@contextmanager
def tracked(
    config: RunConfig, record: RunRecord, warn: Callable[[str], None]
) -> Iterator[Callable[[Summary], None]]:
    """Gives a function that sends the figures of finished iterations; ``warn`` reports failures."""
    threads = [_Thread(tracker, config, record) for tracker in config.tracking.report_to]
    for thread in threads:
        thread.start()

    def update(summary: Summary) -> None:
        for thread in threads:
            thread.news.put(news_of(summary))

    try:
        yield update
        for thread in threads:
            thread.is_ok = True
    finally:
        for thread in threads:
            thread.news.put(None)
        for thread in threads:
            thread.join(_LAST_SECONDS)
            failure = thread.failure
            if thread.is_alive():
                failure = f"not everything is sent {_LAST_SECONDS:g} s after the run"
            if failure:
                warn(f"tracker {thread.tracker}: {failure}; `geb resume` sends the rest")


def news_of(summary: Summary) -> News:
    """Metrics of the iterations that are done, in order."""
    news = {}
    first_step = 0
    for row in summary.rows:
        place = f"iteration-{row.iteration}"
        if row.iteration and summary.artifact(row.iteration, "promote") is None:
            break
        train = summary.artifact(row.iteration, "train")
        if train is not None:
            steps = []
            for line in train.file("metrics.jsonl").read_text().splitlines():
                metrics = json.loads(line)
                step = first_step + metrics.pop("step")
                steps.append((step, _numbers("train", metrics)))
            first_step += len(steps)
            news[f"{place}/train"] = ("train/step", steps)
        values = _numbers("evaluation", row.values)
        values |= _numbers("samples", summary.read_json(row.iteration, "pair", "metrics.json"))
        for name, rows in summary.suites.items():
            for suite_row in rows:
                if suite_row.iteration == row.iteration:
                    values |= _numbers(f"suites/{name}", suite_row.values)
        news[place] = ("iteration", [(row.iteration, values)])
    return news


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers, as ``group/name``."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, int | float) and math.isfinite(value):
            numbers[f"{group}/{name}"] = float(value)
    return numbers
