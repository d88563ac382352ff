"""Session with a tracker, as a program of its own: it can neither block nor break the run.

Requests come as JSON lines on stdin, each is answered by one on stdout. It imports the standard
library and one tracker, so that any environment with the tracker's package can run it by its path.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

Values = Mapping[str, float]
Points = list[tuple[int, Values]]
# mlflow takes so many metrics, and so many parameters, at once.
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_LENGTH = 1000, 100, 500


class Session(Protocol):
    """Session of a run with one tracker.

    Attributes:
        id: Its identity at the tracker, by which it is continued.
    """

    id: str

    def log(self, axis: str, points: Points) -> None:
        """Takes metrics.

        Args:
            axis: Metric that the steps are values of: `iteration` or `train/step`.
            points: Step, and metrics by name.
        """
        ...

    def link(self, facts: Mapping[str, str]) -> None:
        """Takes what the run is linked with: its model, its checkpoint, its report."""
        ...

    def close(self, ok: bool) -> None:
        """Ends the session, which may be opened again."""
        ...


class Tensorboard:
    """Event files in ``tensorboard/RUN``; another session with a run adds a file."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self.id = opening["run"]
        self._writer = SummaryWriter(str(Path(opening["folder"]) / "tensorboard" / self.id))
        if opening["session"] is None:
            text = json.dumps(opening["config"], indent=2)
            self._writer.add_text("configuration", "".join(f"    {x}\n" for x in text.split("\n")))

    def log(self, axis: str, points: Points) -> None:
        """See :class:`Session`."""
        for step, values in points:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def link(self, facts: Mapping[str, str]) -> None:
        """See :class:`Session`."""
        self._writer.add_text("run", "\n".join(f"- {name}: {x}" for name, x in facts.items()))

    def close(self, ok: bool) -> None:
        """See :class:`Session`."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; offline unless WANDB_MODE says otherwise."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        import wandb

        self.id = opening["session"] or secrets.token_hex(4)
        folder = Path(os.environ.get("WANDB_DIR", opening["folder"]))
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=opening["project"],
            name=opening["run"],
            id=self.id,
            resume="allow" if opening["session"] else None,
            group=os.environ.get("WANDB_RUN_GROUP", opening["run"]),
            job_type="run",
            config=opening["config"],
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._defined: set[str] = set()

    def log(self, axis: str, points: Points) -> None:
        """See :class:`Session`."""
        for step, values in points:
            for name in values.keys() - self._defined:
                self._run.define_metric(name, step_metric=axis)
            self._defined |= values.keys()
            self._run.log({axis: step, **values})

    def link(self, facts: Mapping[str, str]) -> None:
        """See :class:`Session`."""
        self._run.summary.update(dict(facts))

    def close(self, ok: bool) -> None:
        """See :class:`Session`."""
        self._run.finish(exit_code=0 if ok else 1)


class Mlflow:
    """A run of MLflow; in a local SQLite database unless MLFLOW_TRACKING_URI says otherwise."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        folder = Path(opening["folder"]) / "mlflow"
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if place is None:
            folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(place or f"sqlite:///{folder / 'mlflow.db'}")
        if opening["session"]:
            self.id = opening["session"]
            self._client.update_run(self.id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(opening["project"])
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(
                opening["project"], None if place else (folder / "artifacts").as_uri()
            )
        )
        self.id = self._client.create_run(experiment, run_name=opening["run"]).info.run_id
        self._describe(opening["config"])

    def _describe(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(name, text[:_MLFLOW_LENGTH]) for name, text in _flat(config)]
        for start in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self.id, params=params[start : start + _MLFLOW_PARAMS])

    def log(self, axis: str, points: Points) -> None:
        """See :class:`Session`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            # A name that MLflow refuses would lose the whole batch.
            Metric(re.sub(r"[^\w\-. :/]", "-", name), value, now, step)
            for step, values in points
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self.id, metrics=metrics[start : start + _MLFLOW_METRICS])

    def link(self, facts: Mapping[str, str]) -> None:
        """See :class:`Session`."""
        for name, text in facts.items():
            self._client.set_tag(self.id, f"geb.{name}", text)

    def close(self, ok: bool) -> None:
        """See :class:`Session`."""
        self._client.set_terminated(self.id, "FINISHED" if ok else "FAILED")


class Trackio:
    """A run of Trackio; in local files unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(Path(opening["folder"]) / "trackio"))
        import trackio

        self._run = trackio.init(
            project=opening["project"],
            name=opening["run"],
            group=opening["run"],
            config=dict(_flat(opening["config"])),
            resume="allow" if opening["session"] else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._trackio = trackio
        self.id = opening["run"]

    def log(self, axis: str, points: Points) -> None:
        """See :class:`Session`."""
        for step, values in points:
            self._trackio.log({axis: step, **values}, step=step)

    def link(self, facts: Mapping[str, str]) -> None:
        """See :class:`Session`."""
        # A run's configuration is written once: links are in its log, beside the metrics.
        self._trackio.log({f"run/{name}": text for name, text in facts.items()})

    def close(self, ok: bool) -> None:
        """See :class:`Session`."""
        self._trackio.finish()


SESSIONS: dict[str, Callable[[Mapping[str, Any]], Session]] = {
    "mlflow": Mlflow,
    "tensorboard": Tensorboard,
    "trackio": Trackio,
    "wandb": Wandb,
}


def _flat(values: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``section.field`` and text; what is not set is left out."""
    if isinstance(values, Mapping):
        for name, each in values.items():
            yield from _flat(each, f"{place}.{name}" if place else str(name))
    elif values is not None and values != []:
        yield place, values if isinstance(values, str) else json.dumps(values)


def main() -> None:
    """Serves one session until stdin ends; an error ends it, and is its last answer."""
    answers = os.fdopen(os.dup(1), "w")
    # What trackers print goes into the log.
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    session: Session | None = None
    ok = False
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            what = asked.pop("do")
            if what == "open":
                session = SESSIONS[asked["tracker"]](asked)
                answer(session=session.id)
                continue
            assert session is not None, "the first request opens the session"
            if what == "close":
                ok = asked["ok"]
                break
            getattr(session, what)(**asked)
            answer()
        if session is not None:
            session.close(ok)
        answer()
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
