"""The Hugging Face Trainer with micro-batches of rows and sums per step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from stages.contract.errors import UserError
from stages.modeling.logprobs import ResponseLogprobs
from stages.training.batches import B, MicroBatches, Plan
from stages.training.callbacks import OptimizerClock
from stages.training.saving import SavingTrainer
from stages.training.timing import StepClock, flops_per_token, peak_memory_mib

# Attributes of a micro-batch that are added up over a step, after the loss's own sums.
_COUNTS = ("num_tokens", "num_tokens_shared", "num_response_tokens")


@dataclass(frozen=True)
class Setup:
    """Parts of a trainer that the engine makes.

    Attributes:
        model: The policy.
        args: Arguments whose output folder is where checkpoints are written before they are whole.
        plan: Samples of each step.
        make_room: Removes older checkpoints before one is written; called on the first process.
        publish: Makes a written checkpoint count; called on the first process.
        callbacks: Those that report.
    """

    model: ResponseLogprobs
    args: TrainingArguments
    plan: Plan[Any]
    make_room: Callable[[], None]
    publish: Callable[[Path], None]
    callbacks: list[TrainerCallback]


class PackedTrainer(SavingTrainer, Generic[B]):
    """Minimises the mean of a loss over the terms of a global batch.

    One "epoch" of the Trainer spans all epochs of the plan, so that every step has the same number
    of micro-batches and a checkpoint's step is its place in the data. A subclass gives the loss.

    Args:
        setup: Model, plan and arguments.
        batches: All micro-batches of this process.
        num_sums: How many sums :meth:`micro_loss` gives.
    """

    def __init__(self, setup: Setup, batches: MicroBatches[B, Any], *, num_sums: int) -> None:
        super().__init__(
            model=setup.model,
            args=setup.args,
            train_dataset=batches,
            callbacks=setup.callbacks,
            make_room=setup.make_room,
            publish=setup.publish,
        )
        self.remove_callback(PrinterCallback)
        # compute_loss divides by the terms of the whole global batch itself.
        self.loss_is_scaled_for_ga = True
        self._plan = setup.plan
        self._num_sums = num_sums
        self._sums = self._no_sums()
        self._counts: Counter[str] = Counter()
        self._clock = StepClock(setup.args.device)
        self._flops = flops_per_token(setup.model.policy)
        self.add_callback(OptimizerClock(self._clock))

    @abstractmethod
    def micro_loss(self, model: nn.Module, batch: B) -> tuple[Tensor, Tensor]:
        """The sum of a micro-batch's terms, and float64 sums for the step's record.

        Neither may wait for the device.
        """

    @abstractmethod
    def step_record(self, sums: Tensor) -> dict[str, float]:
        """Values of a step's record.

        Args:
            sums: Those of :meth:`micro_loss`, added up over the step and all processes.
        """

    @property
    @abstractmethod
    def remedy(self) -> str:
        """Remedy where the loss is not finite."""

    def before_step(self, samples: list[B]) -> None:
        """Called with a step's micro-batches before any gradient is computed."""

    def after_step(self) -> dict[str, float]:
        """Further values of a step's record, made when its weights are updated; none by default.

        Called in all processes.
        """
        return {}

    def get_train_dataloader(self) -> DataLoader:
        """The micro-batches in their order; accelerate must neither shard nor shuffle them."""
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=_only)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[B], None]:
        """Fetches a step's micro-batches."""
        with self._clock.measure("data"):
            samples = list(islice(epoch_iterator, num_batches))
        self.before_step(samples)
        return samples, None

    def training_step(
        self, model: nn.Module, inputs: B, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward pass of a micro-batch; the clock takes the forward pass out."""
        with self._clock.measure("backward"):
            return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: B) -> B:
        return inputs.to(self.args.device)

    def floating_point_ops(self, inputs: B) -> int:
        """Zero: :meth:`log` counts operations, for the layout that is used."""
        return 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: B,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """This micro-batch's part of the global batch's mean loss; waits for no device."""
        with self._clock.measure("forward"):
            loss, sums = self.micro_loss(model, inputs)
        if inputs.weight > 0.0:
            self._sums += sums
            self._counts.update({name: getattr(inputs, name) for name in _COUNTS})
        # Gradients are averaged over processes, the mean is over the terms of all of them.
        return loss * (inputs.weight * self._plan.world_size)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds sums, counts and timings to a step's record."""
        if "loss" in logs:
            own = self._sums.new_tensor([self._counts[name] for name in _COUNTS])
            sums = self.reduce(torch.cat([self._sums, own])).cpu()
            self._sums, self._counts = self._no_sums(), Counter()
            logs = {**logs, **self.step_record(sums[: self._num_sums])}
            counts = dict(zip(_COUNTS, sums[self._num_sums :].tolist(), strict=True))
            logs |= counts
            self.check_finite(logs)
            per_token, per_response_token = self._flops
            logs["model_tflop"] = (
                per_token * counts["num_tokens_shared"]
                + per_response_token * counts["num_response_tokens"]
            ) / 1e12
            logs |= {f"{part}_seconds": spent for part, spent in self._clock.take().items()}
            logs |= self.after_step()
            logs["peak_memory_mib"] = peak_memory_mib(self.args.device)
        super().log(logs, start_time)

    def reduce(self, sums: Tensor) -> Tensor:
        """Adds up over all processes."""
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    def _no_sums(self) -> Tensor:
        return torch.zeros(self._num_sums, dtype=torch.float64, device=self.args.device)

    def check_finite(self, logs: dict[str, float]) -> None:
        """Ends a training whose loss or gradient is infinite or no number."""
        # A retry would come to the same step with the same numbers.
        terms = {
            name: logs[name] for name in ("loss", "bonus", "kappa", "grad_norm") if name in logs
        }
        if not all(math.isfinite(logs[name]) for name in ("loss", "grad_norm") if name in logs):
            raise UserError(
                f"training diverged at step {self.state.global_step}: "
                + ", ".join(f"{name} {value:g}" for name, value in terms.items()),
                self.remedy,
            )


def _only(items: list[B]) -> B:
    return items[0]
