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
from stages.training.batches import B, Batch, Plan
from stages.training.checkpoints import Checkpoints
from stages.training.engine import Engine, Process
from stages.training.metrics import StepLog, peak_memory_mib

CHECKPOINT_SECONDS = 600.0
"""Seconds between checkpoints, if no number of steps is set."""
# Attributes of a micro-batch that are added up over a step, after the loss's own sums.
_COUNTS = ("num_tokens", "num_tokens_shared", "num_response_tokens")


class Objective(ABC, Generic[B]):
    """Loss of a stage, as sums over the terms of a global batch."""

    num_sums: int
    """Number of sums that :meth:`micro_loss` gives."""
    remedy: str
    """Remedy for a loss that is not finite."""

    @abstractmethod
    def micro_loss(self, batch: B) -> tuple[Tensor, Tensor]:
        """The sum of a micro-batch's terms, and float64 sums for the step's record.

        Neither may wait for the device.
        """

    @abstractmethod
    def step_record(self, sums: Tensor) -> dict[str, float]:
        """Values of a step's record, from sums added up over the step and all processes."""

    def make_batch(self, samples: Sequence[Any], **fields: Any) -> Any:
        """A micro-batch of samples and of the fields of :class:`Batch`."""
        return Batch(**fields)

    def before_step(self, batches: list[B]) -> None:
        """Called with the micro-batches of a step before any gradient is computed."""

    def state(self) -> dict[str, Any]:
        """State that a checkpoint keeps."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave."""


@dataclass
class TrainingLoop(Generic[B]):
    """Minimises the mean of an objective over the terms of each global batch."""

    engine: Engine
    objective: Objective[B]
    plan: Plan[Any]
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
        rank = self.process.rank
        engine.train()
        if self.log is not None:
            self.log.start(done)
        every_steps = self.plan.params.checkpoint_every_steps
        saved_at = time.monotonic()
        for step in range(done, self.plan.num_steps):
            batches: list[B] = self.plan.batches(step, rank, objective.make_batch)
            objective.before_step(batches)
            total = torch.zeros((), device=engine.device)
            sums = torch.zeros(objective.num_sums, dtype=torch.float64, device=engine.device)
            for number, batch in enumerate(batches, 1):
                loss, batch_sums = self.micro_step(batch, last=number == len(batches))
                total += loss
                if batch.weight > 0.0:
                    sums += batch_sums
            grad_norm, learning_rate = engine.step()
            values = self._record(step, batches, total, sums, grad_norm, learning_rate)
            if self.log is not None:
                self.log.report(step + 1, values)
            is_due = time.monotonic() - saved_at >= CHECKPOINT_SECONDS
            if every_steps is not None:
                is_due = (step + 1) % every_steps == 0
            flags = [self.process.stop_requested(), is_due]
            stop, is_due = self.process.any(flags, engine.device)
            # The final weights are about to be written: no checkpoint is due, unless we stop here.
            if stop or (is_due and step + 1 < self.plan.num_steps):
                self.checkpoints.save(step + 1, engine, self.log, objective.state())
                saved_at = time.monotonic()
            if stop:
                raise StoppedError("asked to stop (SIGTERM)")

    def micro_step(self, batch: B, *, last: bool) -> tuple[Tensor, Tensor]:
        """Adds a micro-batch's part of the global batch's gradient; waits for no device."""
        with self.engine.accumulating(last=last):
            batch = batch.to(self.engine.device)
            loss, sums = self.objective.micro_loss(batch)
            # Gradients are averaged over processes, the mean is over the terms of all of them.
            loss = loss * (batch.weight * self.process.world_size)
            self.engine.backward(loss, last=last)
        return loss.detach(), sums

    def _record(
        self,
        step: int,
        batches: list[B],
        total: Tensor,
        sums: Tensor,
        grad_norm: float | None,
        learning_rate: float,
    ) -> dict[str, float]:
        """A step's values, added up over all processes."""
        counted = [batch for batch in batches if batch.weight > 0.0]
        counts = [sum(getattr(batch, name) for batch in counted) for name in _COUNTS]
        share = total.double()[None] / self.process.world_size
        whole = self.process.sum(torch.cat([share, sums.new_tensor(counts), sums])).cpu()
        loss, *counts = whole[: 1 + len(_COUNTS)].tolist()
        values = {"loss": loss}
        if grad_norm is not None:
            values["grad_norm"] = grad_norm
        values["learning_rate"] = learning_rate
        values |= self.objective.step_record(whole[1 + len(_COUNTS) :])
        if not (math.isfinite(loss) and math.isfinite(grad_norm or 0.0)):
            terms = (name for name in ("loss", "bonus", "kappa", "grad_norm") if name in values)
            # A retry would come to the same step with the same numbers.
            raise UserError(
                f"training diverged at step {step + 1}: "
                + ", ".join(f"{name} {values[name]:g}" for name in terms),
                self.objective.remedy,
            )
        values |= zip(_COUNTS, counts, strict=True)
        values["peak_memory_mib"] = peak_memory_mib(self.engine.device)
        return values
