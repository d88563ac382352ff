"""Live curves of a training, sent to trackers by transformers' own callbacks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.trainer_callback import CallbackHandler

from stages.contract.errors import UserError
from stages.training.job import Job


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
