"""Engine of a training: model, optimizer and schedule in one process, or in several under DDP.

A subclass keeps them in shards: `zero.ZeroEngine` by DeepSpeed, `fsdp.FsdpEngine` by torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from stages.modeling.file_backed import Place
from stages.modeling.logprobs import ResponseLogprobs
from stages.training.batches import Plan, Rows
from stages.training.job import Process
from stages.training.params import TrainingParams
from stages.training.policy import Numerics

_WEIGHTS_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.pt"
_SCHEDULE_FILE = "scheduler.pt"
# Weights that AdamW's decay leaves alone, as transformers' Trainer names them.
_UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


class Engine:
    """A model that is trained whole in each process; gradients are averaged over processes.

    Args:
        model: The policy.
        params: Say how it is optimized.
        plan: Number of steps, and of micro-batches in each.
        numerics: Device and dtypes.
        process: This process.

    Attributes:
        model: The policy.
        device: Where it computes.
        optimizer: AdamW.
    """

    def __init__(
        self,
        model: ResponseLogprobs,
        params: TrainingParams,
        plan: Plan[Any],
        numerics: Numerics,
        process: Process,
    ) -> None:
        self.model = model
        self.device = numerics.device
        self._params = params
        self._plan = plan
        self._numerics = numerics
        self._process = process
        self.optimizer = _optimizer(model, params)
        self._wrapped: Any = self._wrap()
        self._schedule = _schedule(self.optimizer, params, plan.num_steps)

    def logprobs(self, rows: Rows) -> Tensor:
        """Log π of the response tokens of rows on the engine's device: [N]."""
        with self._numerics.forward_context():
            return rows.logprobs(self._wrapped)

    def train(self, mode: bool = True) -> None:
        """Sets the model to training, or to evaluation."""
        self._wrapped.train(mode)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Block of a micro-batch's passes; gradients are averaged in a step's last one."""
        if last or not isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext()
        return self._wrapped.no_sync()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradient of a micro-batch's loss."""
        loss.backward()

    def step(self) -> tuple[float | None, float]:
        """Updates the weights.

        Returns:
            The norm of the gradient before it was clipped, if it is known, and the learning rate.
        """
        norm = self._update()
        [learning_rate, *_] = self._schedule.get_last_lr()
        self._schedule.step()
        self._wrapped.zero_grad()
        return norm, float(learning_rate)

    def save(self, folder: Path) -> None:
        """Writes what training goes on from; a collective call."""
        if self._process.is_first:
            save_file(self._trained_weights(), folder / _WEIGHTS_FILE)
            torch.save(self.optimizer.state_dict(), folder / _OPTIMIZER_FILE)
            self._save_schedule(folder)

    def load(self, folder: Path) -> None:
        """Takes what :meth:`save` wrote; a collective call."""
        saved, weights = load_file(folder / _WEIGHTS_FILE), self._trained_weights()
        assert saved.keys() == weights.keys(), "the checkpoint is of another model"
        for name, weight in weights.items():
            weight.copy_(saved[name])
        state = torch.load(folder / _OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state)
        self._load_schedule(folder)

    def whole_weights(self, place: Place, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """The policy's weights by name, whole in the first process; a collective call.

        Args:
            place: Maker of the tensors that hold weights gathered from shards.
            dtype: Type in which these are wanted; the type of the shards if unset.
        """
        weights: dict[str, Tensor] = {}
        # A weight of several names is gathered once, and stays one.
        gathered: dict[int, Tensor | None] = {}
        for name, share in self.model.policy.state_dict(keep_vars=True).items():
            if id(share) not in gathered:
                gathered[id(share)] = self._whole(share, place, dtype)
            whole = gathered[id(share)]
            if whole is not None:
                weights[name] = whole
        return weights

    def _wrap(self) -> nn.Module:
        """The model that is called."""
        self.model.to(self.device)
        if self._process.world_size == 1:
            return self.model
        devices = [self._process.local_rank] if self.device.type == "cuda" else None
        return DistributedDataParallel(self.model, device_ids=devices)

    def _update(self) -> float | None:
        # No norm is above infinity: the gradient stays as it is.
        limit = self._params.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self._wrapped.parameters(), limit)
        self.optimizer.step()
        return norm.item()

    def _whole(self, share: Tensor, place: Place, dtype: torch.dtype | None) -> Tensor | None:
        """A weight gathered from its shards; None in processes that need none."""
        return share.detach()

    def _trained_weights(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def _save_schedule(self, folder: Path) -> None:
        torch.save(self._schedule.state_dict(), folder / _SCHEDULE_FILE)

    def _load_schedule(self, folder: Path) -> None:
        self._schedule.load_state_dict(torch.load(folder / _SCHEDULE_FILE, weights_only=True))


def _optimizer(model: nn.Module, params: TrainingParams) -> AdamW:
    """AdamW over what is trained; norms and biases do not decay."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _UNDECAYED))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    groups = [
        {
            "params": [each for name, each in trained.items() if name in decayed],
            "weight_decay": params.weight_decay,
        },
        {
            "params": [each for name, each in trained.items() if name not in decayed],
            "weight_decay": 0.0,
        },
    ]
    return AdamW(
        groups,
        lr=params.learning_rate,
        betas=(params.adam_beta1, params.adam_beta2),
        eps=params.adam_epsilon,
        fused=True,
    )


def _schedule(optimizer: Optimizer, params: TrainingParams, num_steps: int) -> LRScheduler:
    schedule: LRScheduler = get_scheduler(
        _SCHEDULES[params.lr_schedule],
        optimizer,
        num_warmup_steps=round(params.warmup_ratio * num_steps),
        num_training_steps=num_steps,
    )
    return schedule
