"""Metrics per step: one JSON object a line, live curves in trackers, and means of an epoch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler

from stages.contract.atomic import write_atomically
from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.training.batches import Plan
from stages.training.job import Job
from stages.training.timing import PARTS


class Trackers:
    """The trackers that ``report_to`` names; for the first process.

    Args:
        job: The training.
        num_steps: Optimizer steps in all.
    """

    def __init__(self, job: Job[Any], num_steps: int) -> None:
        # Beside the checkpoints, which go when the artifact is there, curves would be lost.
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(job.logs / "tensorboard"))
        names = list(job.params.report_to)
        self._arguments = TrainingArguments(
            output_dir=str(job.logs),
            report_to=names,
            run_name=job.run or None,
            max_steps=num_steps,
            learning_rate=job.params.learning_rate,
            use_cpu=not job.on_gpu,
        )
        self._state, self._control = TrainerState(max_steps=num_steps), TrainerControl()
        callbacks = get_reporting_integration_callbacks(names)
        self._callbacks = CallbackHandler(callbacks, None, None, None, None)
        self._call(self._callbacks.on_init_end)
        self._call(self._callbacks.on_train_begin)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Sends the values of a step, from 1."""
        self._state.global_step = step
        self._call(self._callbacks.on_log, dict(values))

    def close(self) -> None:
        """Has the trackers write what they hold back."""
        self._call(self._callbacks.on_train_end)

    def _call(self, event: Any, *values: Any) -> None:
        self._control = event(self._arguments, self._state, self._control, *values)


def check_trackers(names: Sequence[str]) -> None:
    """Checks that each tracker is one that transformers knows and that its package is installed.

    Raises:
        UserError: It is not.
    """
    if not names:
        return
    available = get_available_reporting_integrations()
    missing = [name for name in names if name not in available]
    if missing:
        raise UserError(
            f"report_to: {', '.join(missing)} cannot be used here; available are "
            f"{', '.join(available) or 'none'}",
            "install the tracker's package in the environment of the stage, or unset report_to",
        )


METRICS = "metrics.jsonl"
VALIDATION = "validation_"
"""Begins the names of metrics of samples that are not trained on; records of some steps have them.
"""
TIMINGS = (
    "step_seconds",
    *(f"{part}_seconds" for part in PARTS),
    "tokens_per_second",
    "model_flops_utilisation",
    "peak_memory_mib",
)
"""Values that differ between computations of the same result; they stay out of the summary."""
_COUNTED = (
    *("step", "epoch"),
    *("num_tokens", "num_tokens_shared", "num_response_tokens", "model_tflop"),
)


class MetricsLog:
    """The records of a training, kept beside its checkpoints.

    Args:
        path: The file, written anew, for people who watch the training.
        resumed: Folder of the checkpoint that training goes on from, with the records up to its
            step; None if it starts.
    """

    def __init__(self, path: Path, *, resumed: Path | None) -> None:
        self.records: list[dict[str, Any]] = []
        if resumed is not None:
            lines = (resumed / METRICS).read_text().splitlines()
            self.records = [json.loads(line) for line in lines]
        write_atomically(path, self._text())
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Adds the record of one step."""
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def write_to(self, folder: Path) -> None:
        """Writes all records so far into a folder."""
        (folder / METRICS).write_text(self._text())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _text(self) -> str:
        return "".join(json.dumps(record) + "\n" for record in self.records)


class StepReporter:
    """Writes each step's metrics and says how far training is; for the first process.

    Args:
        events: Where progress is reported to.
        log: Where the records go.
        plan: How many steps there are.
        peak_flops: What the devices of all processes can do a second, as measured.
        trackers: Get live curves, if there are any.
    """

    def __init__(
        self,
        events: Emitter,
        log: MetricsLog,
        plan: Plan[Any],
        *,
        peak_flops: float,
        trackers: Trackers | None,
    ) -> None:
        self._events = events
        self._log = log
        self._plan = plan
        self._peak_flops = peak_flops
        self._trackers = trackers
        self._last = time.perf_counter()

    def start(self, done: int) -> None:
        """Starts the clock after so many steps."""
        self._last = time.perf_counter()
        self._events.progress(done, self._plan.num_steps, "steps")

    def report(self, step: int, values: dict[str, float]) -> None:
        """Takes the values of a step, from 1."""
        now = time.perf_counter()
        # Validation is no part of the step.
        seconds = now - self._last - values.get(f"{VALIDATION}seconds", 0.0)
        self._last = now
        record: dict[str, Any] = {
            "step": step,
            "epoch": (step - 1) // self._plan.steps_per_epoch + 1,
            **values,
            **{name: int(value) for name, value in values.items() if name.startswith("num_")},
            "step_seconds": seconds,
            "tokens_per_second": values["num_tokens"] / seconds,
            "model_flops_utilisation": values["model_tflop"] * 1e12 / seconds / self._peak_flops,
        }
        self._log.write(record)
        self._events.metric(step, **values)
        self._events.progress(step, self._plan.num_steps, "steps", f"loss {values['loss']:.4f}")
        if self._trackers is not None:
            self._trackers.log(step, values | {"epoch": step / self._plan.steps_per_epoch})


def summarize(records: list[dict[str, Any]], *, epoch: int, by: str) -> dict[str, float]:
    """Means of an epoch's metrics, validation's left out.

    Args:
        records: Of all steps; each has `epoch` and `by`.
        epoch: Number of the epoch, from 1.
        by: Weight of a step in the mean, such as `num_pairs`.
    """
    chosen = [record for record in records if record["epoch"] == epoch]
    total = sum(record[by] for record in chosen)
    names = [
        name
        for name in chosen[0]
        if name not in (*_COUNTED, *TIMINGS, by) and not name.startswith(VALIDATION)
    ]
    return {name: sum(record[name] * record[by] for record in chosen) / total for name in names}
