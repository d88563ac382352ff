"""The trainer's loss of conversations: negative log-likelihood of the answers' tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stages.sft.examples import Example
from stages.training.batches import Batch, MicroBatches
from stages.training.trainer import PackedTrainer, Setup


class ConversationTrainer(PackedTrainer[Batch]):
    """Minimises the mean negative log-likelihood of a global batch's answer tokens.

    Args:
        setup: Model, plan and arguments.
        batches: All micro-batches of this process.
    """

    def __init__(self, setup: Setup, batches: MicroBatches[Batch, Example]) -> None:
        super().__init__(setup, batches, num_sums=1)

    @property
    def remedy(self) -> str:
        """Remedy where the loss is not finite."""
        return f"lower sft.learning_rate ({self.args.learning_rate:g})"

    def micro_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood, and the number of conversations."""
        logprobs = batch.rows.logprobs(model)
        count = float(len(batch.rows.response_mask))
        return -logprobs.sum(), torch.full((1,), count, dtype=torch.float64, device=logprobs.device)

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """The number of conversations."""
        return {"num_conversations": sums.item()}
