"""Callbacks of the trainer: reports, checkpoints that are due, a wish to stop, a clock."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.training.batches import Plan
from stages.training.job import Process
from stages.training.metrics_log import VALIDATION, MetricsLog
from stages.training.timing import StepClock


class StepReporter(TrainerCallback):
    """Writes each step's metrics and says how far training is; for the first process.

    Args:
        process: This process.
        log: Where the records go.
        plan: How many steps there are.
        peak_flops: What the devices of all processes can do a second, as measured.
    """

    def __init__(
        self, process: Process, log: MetricsLog, plan: Plan[Any], *, peak_flops: float
    ) -> None:
        self._events = process.events
        self._log = log
        self._plan = plan
        self._peak_flops = peak_flops
        self._last = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Starts the clock."""
        self._last = time.perf_counter()
        self._events.progress(state.global_step, self._plan.num_steps, "steps")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gives trackers the plan's epoch in place of the Trainer's own single one."""
        state.epoch = state.global_step / self._plan.steps_per_epoch

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Takes the record of a step."""
        if logs is None or "num_tokens" not in logs:
            return
        now = time.perf_counter()
        # Validation is no part of the step.
        seconds = now - self._last - logs.get(f"{VALIDATION}seconds", 0.0)
        self._last = now
        step = state.global_step
        values = {name: float(value) for name, value in logs.items() if name != "epoch"}
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


class CheckpointSchedule(TrainerCallback):
    """Saves when steps or seconds are over, or when the stage is asked to stop.

    All processes save and stop at the same step.

    Args:
        process: This process.
        every_steps: Steps between checkpoints, or None.
        every_seconds: Seconds between checkpoints, or None.
    """

    def __init__(
        self, process: Process, *, every_steps: int | None, every_seconds: float | None
    ) -> None:
        self._process = process
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._last = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Decides after each step."""
        stop, due = self._agree(args.device)
        if self._every_steps is not None and state.global_step % self._every_steps == 0:
            due = True
        if stop:
            control.should_training_stop = True
        # The final weights are about to be written: no checkpoint is due, unless we stop here.
        if stop or (due and state.global_step < state.max_steps):
            control.should_save = True
            self._last = time.monotonic()

    def _agree(self, device: torch.device) -> tuple[bool, bool]:
        """Answers of all processes: one was told to stop, and the first one's clock has run out."""
        stop = self._process.stop_requested()
        seconds = self._every_seconds
        due = seconds is not None and time.monotonic() - self._last >= seconds
        if self._process.world_size == 1:
            return stop, due
        flags = torch.tensor([stop, due and self._process.is_first], dtype=torch.int, device=device)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        agreed = flags.tolist()
        return bool(agreed[0]), bool(agreed[1])


class OptimizerClock(TrainerCallback):
    """Measures the optimizer's step; under DeepSpeed it is part of the backward pass.

    Args:
        clock: Takes the time.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._measuring = ExitStack()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        self._measuring.enter_context(self._clock.measure("optimizer"))

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stops the clock."""
        self._measuring.close()
