"""Session with a tracker, as a program of its own: it can neither block nor break the run.

It looks into a file for what the session is to have, until stdin has ended. It imports the standard
library and one tracker, so that any environment with the tracker's package can run it by its path.
"""

import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

_POLL_SECONDS = 0.5
Opening = Mapping[str, Any]
"""Arguments of a session: ``project``, ``run``, ``folder``, ``config``, and ``session``, the id of
the session that goes on; None opens a new one."""
Points = list[tuple[int, dict[str, float]]]


class Session(Protocol):
    """Session of a run with one tracker, opened by its constructor."""

    id: str
    """Its identity at the tracker, by which it is continued."""

    def log(self, axis: str, points: Points) -> None:
        """Takes the name of an axis, and metrics by its steps."""

    def link(self, facts: Mapping[str, str]) -> None:
        """Takes the names and places that the run is linked with."""

    def close(self, ok: bool) -> None:
        """Ends the session, which may be opened again; takes whether the run ended well."""


class _TensorBoard:
    """Event files in ``tensorboard/RUN``; another session with a run adds a file."""

    def __init__(self, opening: Opening) -> None:
        from tensorboardX import SummaryWriter

        self.id = opening["run"]
        self._writer = SummaryWriter(str(Path(opening["folder"]) / "tensorboard" / self.id))
        if opening["session"] is None:
            text = json.dumps(opening["config"], indent=2)
            self._writer.add_text("configuration", indent(text, "    "))

    def log(self, axis: str, points: Points) -> None:
        for step, values in points:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def link(self, facts: Mapping[str, str]) -> None:
        self._writer.add_text("run", "\n".join(f"- {name}: {x}" for name, x in facts.items()))

    def close(self, ok: bool) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; offline unless WANDB_MODE says otherwise."""

    def __init__(self, opening: Opening) -> None:
        import wandb

        self._run = wandb.init(
            project=opening["project"],
            name=opening["run"],
            id=opening["session"],
            resume="allow",
            config=opening["config"],
            dir=os.environ.get("WANDB_DIR", opening["folder"]),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.id = self._run.id

    def log(self, axis: str, points: Points) -> None:
        for group in {name.partition("/")[0] for _, values in points for name in values}:
            self._run.define_metric(f"{group}/*", step_metric=axis)
        for step, values in points:
            self._run.log({axis: step, **values})

    def link(self, facts: Mapping[str, str]) -> None:
        self._run.summary.update(dict(facts))

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


class _Mlflow:
    """A run of MLflow; in a local SQLite database unless MLFLOW_TRACKING_URI says otherwise."""

    def __init__(self, opening: Opening) -> None:
        import mlflow

        folder = Path(opening["folder"]) / "mlflow"
        if "MLFLOW_TRACKING_URI" not in os.environ:
            folder.mkdir(exist_ok=True)
            # MLflow keeps files of a local run below the present folder.
            os.chdir(folder)
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        self._mlflow = mlflow
        mlflow.set_experiment(opening["project"])
        run = mlflow.start_run(run_id=opening["session"], run_name=opening["run"])
        self.id = run.info.run_id
        if opening["session"] is None:
            mlflow.log_params(dict(_flat(opening["config"])))

    def log(self, axis: str, points: Points) -> None:
        now = int(time.time() * 1000)
        metrics = [
            # A name that MLflow refuses would lose the whole batch.
            self._mlflow.entities.Metric(re.sub(r"[^\w\-. :/]", "-", name), value, now, step)
            for step, values in points
            for name, value in values.items()
        ]
        self._mlflow.MlflowClient().log_batch(self.id, metrics=metrics)

    def link(self, facts: Mapping[str, str]) -> None:
        self._mlflow.set_tags({f"geb.{name}": text for name, text in facts.items()})

    def close(self, ok: bool) -> None:
        self._mlflow.end_run("FINISHED" if ok else "FAILED")


class _Trackio:
    """A run of Trackio; in local files unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    def __init__(self, opening: Opening) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(Path(opening["folder"]) / "trackio"))
        import trackio

        self.id = opening["run"]
        self._trackio = trackio
        trackio.init(
            project=opening["project"],
            name=opening["run"],
            config=dict(_flat(opening["config"])),
            resume="allow" if opening["session"] else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, axis: str, points: Points) -> None:
        for step, values in points:
            self._trackio.log({axis: step, **values}, step=step)

    def link(self, facts: Mapping[str, str]) -> None:
        # A run's configuration is written once: links are in its log, beside the metrics.
        self._trackio.log({f"run/{name}": text for name, text in facts.items()})

    def close(self, ok: bool) -> None:
        self._trackio.finish()


_TRACKERS: dict[str, Callable[[Opening], Session]] = {
    "mlflow": _Mlflow,
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _Wandb,
}


def _flat(values: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``section.field`` and text; what is not set is left out."""
    if isinstance(values, Mapping):
        for name, each in values.items():
            yield from _flat(each, f"{place}.{name}" if place else str(name))
    elif values is not None and values != []:
        yield place, values if isinstance(values, str) else json.dumps(values)


def main() -> None:
    """Serves one session: ``program.py TRACKER FILE STATE``."""
    file, state = map(Path, sys.argv[2:])
    known = json.loads(state.read_text()) if state.exists() else {"session": None, "sent": {}}
    told = json.loads(file.read_text())
    Path(told["folder"]).mkdir(parents=True, exist_ok=True)
    session: Session = _TRACKERS[sys.argv[1]](told | known)
    sent = known["sent"]
    is_over = False
    while not is_over:
        # The last look is after the end of the run.
        is_over = bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])
        told = json.loads(file.read_text())
        for name, wanted in told["wanted"].items():
            if sent.get(name) == wanted["digest"]:
                continue
            if "points" in wanted:
                session.log(wanted["axis"], wanted["points"])
            else:
                session.link(wanted["facts"])
            sent[name] = wanted["digest"]
            part = state.with_suffix(".part")
            part.write_text(json.dumps({"session": session.id, "sent": sent}))
            part.replace(state)
    session.close(told["ok"])


if __name__ == "__main__":
    main()
