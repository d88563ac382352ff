"""Checkpoints of the Hugging Face Trainer: one file, FSDP2's shards, or DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from stages.training import fsdp
from stages.training.universal import mend_optimizer

_WEIGHTS_FILE = "model.safetensors"
_SCHEDULER_FILE = "scheduler.pt"


class SavingTrainer(Trainer):
    """Writes checkpoints of what is trained, which count once they are whole.

    Args:
        make_room: Removes older checkpoints before one is written; called on the first process.
        publish: Makes a written checkpoint count; called on the first process.
        arguments: Those of the Trainer.
    """

    def __init__(
        self, *, make_room: Callable[[], None], publish: Callable[[Path], None], **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._make_room = make_room
        self._publish = publish
        self._weight_decays: list[float] = []

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the weights being trained; checkpoints of shards have them already."""
        if self._in_fsdp or self.is_deepspeed_enabled or not self.args.should_save:
            return
        assert output_dir is not None
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_file(self._trained_weights(), Path(output_dir) / _WEIGHTS_FILE)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if self._in_fsdp:
            fsdp.load_weights(self.model, Path(resume_from_checkpoint))
            return
        saved = load_file(Path(resume_from_checkpoint) / _WEIGHTS_FILE)
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
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._in_fsdp:
            if checkpoint is not None:
                fsdp.load_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint))
                schedule = torch.load(Path(checkpoint) / _SCHEDULER_FILE, weights_only=True)
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
