"""The URM reward model: five attribute means, an uncertainty for each, and a gate that weighs them.

Uncertainty-aware Reward Model (arXiv 2410.00847), checkpoint ``LxzGordon/URM-LLaMa-3.1-8B``. With
h the last hidden state of the conversation's last token,

    (m_1, s_1, …, m_5, s_5) = W h,    w = gate(h),    score = Σ_i m_i · w_i.

The checkpoint comes with code of its own; loaded without it, as a plain sequence classifier, its
gate is dropped without a word. Here the architecture is written out, and a checkpoint whose weights
are not exactly those of the architecture is refused.

Shapes: ``B`` conversations of a batch, ``T`` tokens of the longest, ``H`` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaModel, LlamaPreTrainedModel

# HelpSteer2's order, which is the head's.
ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


@dataclass(frozen=True)
class UrmOutput:
    """The model's output for a batch.

    Attributes:
        means: Mean of each attribute, [B, 5].
        gates: Weight of each attribute, [B, 5]; of any sign, they do not sum to one.
    """

    means: Tensor
    gates: Tensor

    @property
    def scores(self) -> Tensor:
        """Gated score of each conversation, [B]."""
        return (self.means * self.gates).sum(dim=-1)


class Gate(nn.Module):
    """The MLP that weighs the attributes; ``fc.0``, ``fc.2`` and ``fc.4`` name its weights."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(hidden_size, hidden_size),
            nn.SELU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SELU(),
            nn.Linear(hidden_size, len(ATTRIBUTES)),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Weights [B, 5] from hidden states [B, H]."""
        return self.fc(hidden)


class UrmModel(LlamaPreTrainedModel):
    """A Llama with URM's head (``score``) and gate (``weights``), named as in the checkpoint."""

    # Head and gate work on one state of each conversation: float32 costs nothing there, and the
    # gate's products of means and weights would lose digits otherwise.
    _keep_in_fp32_modules_strict: ClassVar[set[str]] = {"score", "weights"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 2 * len(ATTRIBUTES), bias=False)
        self.weights = Gate(config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> UrmOutput:
        """Reads conversations padded on the right.

        Args:
            input_ids: Token ids, [B, T].
            attention_mask: 1 for tokens, 0 for padding, [B, T].
        """
        states = self.model(input_ids, attention_mask=attention_mask, use_cache=False)[0]
        rows = torch.arange(len(input_ids), device=states.device)
        last = states[rows, attention_mask.sum(dim=1) - 1].float()
        parameters = self.score(last).view(-1, len(ATTRIBUTES), 2)
        return UrmOutput(means=parameters[..., 0], gates=self.weights(last))
