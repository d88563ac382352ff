"""The Hugging Face Trainer with micro-batches of rows, sums per step and whole checkpoints."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from stages.contract.errors import UserError
from stages.modeling.logprobs import ResponseLogprobs
from stages.training import fsdp
from stages.training.batches import B, MicroBatches, Plan
from stages.training.timing import StepClock, flops_per_token, peak_memory_mib
from stages.training.universal import mend_optimizer

WEIGHTS_FILE = "model.safetensors"
SCHEDULER_FILE = "scheduler.pt"
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


class PackedTrainer(Trainer, Generic[B]):
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
        )
        self.remove_callback(PrinterCallback)
        # compute_loss divides by the terms of the whole global batch itself.
        self.loss_is_scaled_for_ga = True
        self._plan = setup.plan
        self._make_room = setup.make_room
        self._publish = setup.publish
        self._weight_decays: list[float] = []
        self._num_sums = num_sums
        self._sums = self._no_sums()
        self._counts: Counter[str] = Counter()
        self._clock = StepClock(setup.args.device)
        self._flops = flops_per_token(setup.model.policy)
        self.add_callback(_OptimizerClock(self._clock))

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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the weights being trained; checkpoints of shards have them already."""
        if self._in_fsdp or self.is_deepspeed_enabled or not self.args.should_save:
            return
        assert output_dir is not None
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_file(self._trained_weights(), Path(output_dir) / WEIGHTS_FILE)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self._in_fsdp:
            fsdp.load_weights(self.model, Path(resume_from_checkpoint))
            return
        saved = load_file(Path(resume_from_checkpoint) / WEIGHTS_FILE)
        weights = self._trained_weights()
        assert saved.keys() == weights.keys(), "the checkpoint is of another model"
        for name, weight in weights.items():
            weight.copy_(saved[name])

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own; remembers what a universal checkpoint would overwrite."""
        optimizer = super().create_optimizer(model)
        # DeepSpeed drops empty groups: adapters have no weight that is spared of decay.
        self._weight_decays = [
            group["weight_decay"] for group in optimizer.param_groups if group["params"]
        ]
        return optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._in_fsdp:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        fsdp.save(self.model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._in_fsdp:
            if checkpoint is not None:
                fsdp.load_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint))
                schedule = torch.load(Path(checkpoint) / SCHEDULER_FILE, weights_only=True)
                self.lr_scheduler.load_state_dict(schedule)
            return
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_deepspeed_enabled and self.model_wrapped.load_universal_checkpoint():
            mend_optimizer(self.model_wrapped.optimizer.optimizer, self._weight_decays)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            self._make_room()
        super()._save_checkpoint(model, trial)
        if self.args.world_size > 1:
            torch.distributed.barrier()
        if self.args.should_save:
            self._publish(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    @property
    def _in_fsdp(self) -> bool:
        return isinstance(self.model, FSDPModule)

    def _trained_weights(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

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


class _OptimizerClock(TrainerCallback):
    """Measures the optimizer's step; under DeepSpeed it is part of the backward pass."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._measuring = ExitStack()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        self._measuring.enter_context(self._clock.measure("optimizer"))

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stops the clock."""
        self._measuring.close()


def _only(items: list[B]) -> B:
    return items[0]
