"""Loss of conversations: negative log-likelihood of the answers' tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.training.batches import Batch
from stages.training.engine import Engine
from stages.training.loop import Objective


class AnswerLikelihood(Objective[Batch]):
    """The mean negative log-likelihood of a global batch's answer tokens.

    Args:
        engine: Computes log-probabilities.
        learning_rate: Named in the remedy.
    """

    num_sums = 1

    def __init__(self, engine: Engine, learning_rate: float) -> None:
        self._engine = engine
        self.remedy = f"lower sft.learning_rate ({learning_rate:g})"

    def micro_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood, and the number of conversations."""
        logprobs = self._engine.logprobs(batch.rows)
        count = float(len(batch.rows.response_mask))
        return -logprobs.sum(), torch.full((1,), count, dtype=torch.float64, device=logprobs.device)

    def step_record(self, sums: Tensor) -> dict[str, float]:
        """The number of conversations."""
        return {"num_conversations": sums.item()}
