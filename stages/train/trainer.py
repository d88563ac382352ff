"""The Hugging Face Trainer with the loss of preference pairs, κ, metrics and whole checkpoints.

Shapes: `B` pairs of a micro-batch, `S` tokens of a response.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from stages.contract.errors import UserError
from stages.modeling.logprobs import ResponseLogprobs
from stages.objectives import (
    METRIC_SUMS,
    KappaController,
    ObjectiveSettings,
    ResponseLogps,
    geb_objective,
    loss_and_metrics,
    step_metrics,
    undefined_bonus,
)
from stages.train.batches import Batch, MicroBatches, Plan
from stages.train.timing import StepClock, flops_per_token, peak_memory_mib
from stages.train.universal import mend_optimizer

WEIGHTS_FILE = "model.safetensors"
# Attributes of a micro-batch that are added up over a step, after the objective's metrics.
_COUNTS = ("num_tokens", "num_tokens_shared", "num_response_tokens")


class PairTrainer(Trainer):
    """Minimises the mean over a global batch's pairs of L − κ · L_bonus + weighted NLL.

    One "epoch" of the Trainer spans all epochs of the plan, so that every step has the same number
    of micro-batches and a checkpoint's step is its place in the data.

    Args:
        model: The policy.
        args: Arguments whose output folder is where checkpoints are written before they are whole.
        batches: All micro-batches of this process.
        plan: Which pairs are in which step.
        settings: The objective.
        kappa: Gives κ of each step.
        iteration: Iteration of the run, from 1.
        publish: Makes a written checkpoint count; called on the first process.
        callbacks: Those that report.
    """

    def __init__(
        self,
        *,
        model: ResponseLogprobs,
        args: TrainingArguments,
        batches: MicroBatches,
        plan: Plan,
        settings: ObjectiveSettings,
        kappa: KappaController,
        iteration: int,
        publish: Callable[[Path], None],
        callbacks: list[TrainerCallback],
    ) -> None:
        super().__init__(model=model, args=args, train_dataset=batches, callbacks=callbacks)
        self.remove_callback(PrinterCallback)
        # compute_loss divides by the pairs of the whole global batch itself.
        self.loss_is_scaled_for_ga = True
        self._plan = plan
        self._settings = settings
        self._kappa = kappa
        self._iteration = iteration
        self._publish = publish
        self._step_kappa = 0.0
        self._weight_decays: list[float] = []
        self._sums = self._no_sums()
        self._counts: Counter[str] = Counter()
        self._clock = StepClock(args.device)
        self._flops = flops_per_token(model.policy)
        self.add_callback(_OptimizerClock(self._clock))

    def get_train_dataloader(self) -> DataLoader:
        """The micro-batches in their order; accelerate must neither shard nor shuffle them."""
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=_only)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Batch], None]:
        """Fetches a step's micro-batches and settles its κ, before any gradient is computed."""
        with self._clock.measure("data"):
            samples = list(islice(epoch_iterator, num_batches))
        if self._kappa.calibrating:
            self._calibrate(samples)
        self._step_kappa = self._kappa.kappa(
            step=self.state.global_step, num_steps=self._plan.num_steps, iteration=self._iteration
        )
        return samples, None

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward pass of a micro-batch; the clock takes the forward pass out."""
        with self._clock.measure("backward"):
            return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        return inputs.to(self.args.device)

    def floating_point_ops(self, inputs: Batch) -> int:
        """Nothing: operations are counted by :meth:`log`, for the layout that is used."""
        return 0

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """This micro-batch's part of the global batch's mean loss; waits for no device."""
        with self._clock.measure("forward"):
            loss, sums = loss_and_metrics(
                *self._responses(model, inputs), self._settings, self._step_kappa, inputs.tie
            )
        if inputs.weight > 0.0:
            self._sums += sums
            self._counts.update({name: getattr(inputs, name) for name in _COUNTS})
        # Gradients are averaged over processes, the mean is over the pairs of all of them.
        return loss.sum() * (inputs.weight * self._plan.world_size)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the objective's metrics to a step's record."""
        if "loss" in logs:
            own = self._sums.new_tensor([self._counts[name] for name in _COUNTS])
            sums = self._reduce(torch.cat([self._sums, own])).cpu()
            self._sums, self._counts = self._no_sums(), Counter()
            objective = sums[: len(METRIC_SUMS)]
            logs = {**logs, **step_metrics(objective), "kappa": self._step_kappa}
            logs["num_pairs"] = objective[METRIC_SUMS.index("num_pairs")].item()
            counts = dict(zip(_COUNTS, sums[len(METRIC_SUMS) :].tolist(), strict=True))
            logs |= counts
            self._check_finite(logs)
            per_token, per_response_token = self._flops
            logs["model_tflop"] = (
                per_token * counts["num_tokens_shared"]
                + per_response_token * counts["num_response_tokens"]
            ) / 1e12
            logs |= {f"{part}_seconds": spent for part, spent in self._clock.take().items()}
            logs["peak_memory_mib"] = peak_memory_mib(self.args.device)
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the weights being trained; DeepSpeed's own checkpoint has them already."""
        if self.is_deepspeed_enabled or not self.args.should_save:
            return
        assert output_dir is not None
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_file(self._trained_weights(), Path(output_dir) / WEIGHTS_FILE)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_deepspeed_enabled and self.model_wrapped.load_universal_checkpoint():
            mend_optimizer(self.model_wrapped.optimizer.optimizer, self._weight_decays)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.world_size > 1:
            torch.distributed.barrier()
        if self.args.should_save:
            self._publish(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    def _trained_weights(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def _calibrate(self, samples: list[Batch]) -> None:
        """Shows κ's controller |L| and |bonus| of the coming step, from a pass of its own."""
        absolute = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with torch.no_grad():
            for sample in samples:
                inputs = self._prepare_inputs(sample)
                # Also where no pair is left for this process: the forward pass is collective.
                chosen, rejected = self._responses(self.model_wrapped, inputs)
                output = geb_objective(chosen, rejected, self._settings, inputs.tie)
                if inputs.weight > 0.0:
                    terms = (output.preference_loss, output.bonus)
                    absolute += torch.stack([term.abs().double().sum() for term in terms])
        loss_sum, bonus_sum = self._reduce(absolute).tolist()
        try:
            self._kappa.observe(abs_loss_sum=loss_sum, abs_bonus_sum=bonus_sum)
        except ValueError as error:
            raise UserError(
                f"train.target_ratio: {error}",
                "set train.kappa and unset train.target_ratio",
            ) from error

    def _responses(self, model: nn.Module, inputs: Batch) -> tuple[ResponseLogps, ResponseLogps]:
        rows, reference = inputs.rows, inputs.ref_logprobs
        logp, mask = rows.pad_responses(rows.logprobs(model)), rows.response_mask
        pairs = mask.shape[0] // 2
        chosen, rejected = (
            ResponseLogps(
                logp=logp[side].sum(dim=1),
                ref_logp=reference[side].sum(dim=1),
                num_tokens=mask[side].sum(dim=1),
                token_logp=logp[side],
                token_mask=mask[side],
                ref_token_logp=reference[side],
            )
            for side in (slice(0, pairs), slice(pairs, 2 * pairs))
        )
        return chosen, rejected

    def _reduce(self, sums: Tensor) -> Tensor:
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    def _no_sums(self) -> Tensor:
        """Sums of the objective's metrics."""
        return torch.zeros(len(METRIC_SUMS), dtype=torch.float64, device=self.args.device)

    def _check_finite(self, logs: dict[str, float]) -> None:
        if math.isfinite(logs["loss"]):
            return
        settings = self._settings
        reason = undefined_bonus(settings.bonus)
        if reason is not None and not math.isfinite(logs["bonus"]):
            raise UserError(
                f"the bonus is {logs['bonus']} at step {self.state.global_step}: with "
                f"train.numerics 'paper' that of {settings.design} under {settings.divergence} is "
                f"undefined where {reason}",
                "set train.numerics to 'exact', which is defined everywhere",
            )
        raise UserError(
            f"the loss is {logs['loss']} at step {self.state.global_step} "
            f"(largest terms: bonus {logs['bonus']:g}, kappa {logs['kappa']:g})",
            "lower train.learning_rate or train.kappa, or choose another train.design",
        )


class _OptimizerClock(TrainerCallback):
    """Measures the optimizer's step; under DeepSpeed it is part of the backward pass."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._measuring = ExitStack()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Starts."""
        self._measuring.enter_context(self._clock.measure("optimizer"))

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Ends."""
        self._measuring.close()


def _only(items: list[Batch]) -> Batch:
    return items[0]
