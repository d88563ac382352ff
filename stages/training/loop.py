"""The training loop: from a step's micro-batches to updated weights, a record and a checkpoint."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from stages.contract.errors import StoppedError, UserError
from stages.training.batches import Batch, Plan, S
from stages.training.checkpoints import Checkpoints
from stages.training.engine import Engine, Process
from stages.training.metrics import StepLog, peak_memory_mib

CHECKPOINT_SECONDS = 600.0
"""Seconds between checkpoints, if no number of steps is set."""
# Attributes of samples that are added up over a step.
_COUNTS = ("num_tokens", "num_tokens_shared", "num_response_tokens")


class Objective(ABC, Generic[S]):
    """Loss of a stage, as sums over the terms of a global batch."""

    remedy: str
    """Remedy for a loss that is not finite."""
    num_sums: int
    """Number of sums for the step's record."""

    @abstractmethod
    def micro_loss(self, samples: Sequence[S]) -> tuple[Tensor, Tensor]:
        """The sum of a micro-batch's terms, and ``num_sums`` float64 sums for the step's record.

        Neither may wait for the device.
        """

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """Values of a step's record, from sums added up over the step and all processes."""
        return {}

    def before_step(self, batches: Sequence[Batch[S]]) -> None:
        """Called with the micro-batches of a step before any gradient is computed."""

    def state(self) -> dict[str, Any]:
        """State that a checkpoint keeps."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave."""


@dataclass
class TrainingLoop(Generic[S]):
    """Minimises the mean of an objective over the terms of each global batch."""

    engine: Engine
    objective: Objective[S]
    plan: Plan[S]
    process: Process
    log: StepLog | None
    """Takes each step's record; None in all processes but the first."""
    checkpoints: Checkpoints

    def run(self, done: int) -> None:
        """Trains the steps after the first ``done``, all processes alike.

        Raises:
            StoppedError: SIGTERM came to one of the processes; a checkpoint is saved.
            UserError: The loss or the gradient is not finite.
        """
        engine = self.engine
        objective = self.objective
        engine.train()
        if self.log is not None:
            self.log.start(done)
        every_steps = self.plan.params.checkpoint_every_steps
        saved_at = time.monotonic()
        for step in range(done, self.plan.num_steps):
            batches = self.plan.batches(step, self.process.rank)
            objective.before_step(batches)
            loss = torch.zeros((), device=engine.device)
            sums = torch.zeros(objective.num_sums, dtype=torch.float64, device=engine.device)
            for number, batch in enumerate(batches, 1):
                batch_loss, batch_sums = self.micro_step(batch, last=number == len(batches))
                loss += batch_loss
                sums += batch_sums
            learning_rate = engine.learning_rate(step)
            grad_norm = engine.step(learning_rate)
            if every_steps is None:
                is_due = time.monotonic() - saved_at >= CHECKPOINT_SECONDS
            else:
                is_due = (step + 1) % every_steps == 0
            numbers = [self.process.stop_requested(), is_due]
            # Gradients are averaged over processes, and so is the loss.
            share = loss.double()[None] / self.process.world_size
            whole = self.process.sum(torch.cat([share, sums.new_tensor(numbers), sums])).cpu()
            mean_loss, stop, due = whole[:3].tolist()
            values = {"loss": mean_loss}
            if grad_norm is not None:
                values["grad_norm"] = grad_norm
            values["learning_rate"] = learning_rate
            values |= objective.step_record(whole[3:])
            self._check_finite(step, values)
            trained = self.plan.samples_of(step)
            values |= {name: sum(getattr(sample, name) for sample in trained) for name in _COUNTS}
            values["peak_memory_mib"] = peak_memory_mib(engine.device)
            if self.log is not None:
                self.log.report(step + 1, values)
            # The final weights are about to be written: no checkpoint is due, unless we stop here.
            if stop or (due and step + 1 < self.plan.num_steps):
                self.checkpoints.save(step + 1, engine, self.log, objective.state())
                saved_at = time.monotonic()
            if stop:
                raise StoppedError("asked to stop (SIGTERM)")

    def micro_step(self, batch: Batch[S], *, last: bool) -> tuple[Tensor, Tensor]:
        """Adds a micro-batch's part of the global batch's gradient; waits for no device."""
        engine = self.engine
        with engine.accumulating(last=last):
            if batch.weight:
                loss, sums = self.objective.micro_loss(batch.samples)
            else:
                # Log-probabilities are finite; the objective of them need not be.
                loss = engine.logprobs(engine.rows(batch.samples)).sum()
                sums = loss.new_zeros(self.objective.num_sums, dtype=torch.float64)
            # Gradients are averaged over processes, the mean is over the terms of all of them.
            loss = loss * (batch.weight * self.process.world_size)
            engine.backward(loss, last=last)
        return loss.detach(), sums

    def _check_finite(self, step: int, values: dict[str, float]) -> None:
        if math.isfinite(values["loss"]) and math.isfinite(values.get("grad_norm", 0.0)):
            return
        terms = (name for name in ("loss", "bonus", "kappa", "grad_norm") if name in values)
        # A retry would come to the same step with the same numbers.
        raise UserError(
            f"training diverged at step {step + 1}: "
            + ", ".join(f"{name} {values[name]:g}" for name in terms),
            self.objective.remedy,
        )
