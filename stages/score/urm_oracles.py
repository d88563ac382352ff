"""The URM reward model, and its two readings: oracles ``urm_gated`` and ``urm_helpfulness``.

``urm_gated`` is the score by the model's card. ``urm_helpfulness`` is the helpfulness mean, which a
plain sequence classifier reads from the same checkpoint as its first output.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaModel, LlamaPreTrainedModel

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.modeling.chat import render_conversation
from stages.modeling.load import load_model
from stages.score.oracle import OracleVerdict
from stages.score.params import ScoreParams
from stages.score.reward_model import RewardModel, finite_verdict, load_reward_model

# HelpSteer2's order, which is the head's.
ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


class UrmOutput(NamedTuple):
    """The model's output for a batch."""

    means: Tensor
    """Mean of each attribute, [B, 5]."""
    gates: Tensor
    """Weight of each attribute, [B, 5]; of any sign, they do not sum to one."""


class UrmModel(LlamaPreTrainedModel):
    """A Llama with URM's head (``score``) and gate (``weights``), named as in the checkpoint."""

    # Head and gate work on one state of each conversation: float32 costs nothing there, and the
    # gate's products of means and weights would lose digits otherwise.
    _keep_in_fp32_modules_strict: ClassVar[set[str]] = {"score", "weights"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 2 * len(ATTRIBUTES), bias=False)
        width = config.hidden_size
        gate = nn.Sequential(
            nn.Linear(width, width),
            nn.SELU(),
            nn.Linear(width, width),
            nn.SELU(),
            nn.Linear(width, len(ATTRIBUTES)),
        )
        self.weights = nn.ModuleDict({"fc": gate})
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> UrmOutput:
        """Reads conversations padded on the right: token ids and mask, both [B, T]."""
        states = self.model(input_ids, attention_mask=attention_mask, use_cache=False)[0]
        rows = torch.arange(len(input_ids), device=states.device)
        last = states[rows, attention_mask.sum(dim=1) - 1].float()
        parameters = self.score(last).view(-1, len(ATTRIBUTES), 2)
        return UrmOutput(means=parameters[..., 0], gates=self.weights["fc"](last))


_READINGS: dict[str, Callable[[UrmOutput], Tensor]] = {
    "urm_gated": lambda output: (output.means * output.gates).sum(dim=-1),
    "urm_helpfulness": lambda output: output.means[:, ATTRIBUTES.index("helpfulness")],
}


def load(ctx: StageContext[ScoreParams]) -> RewardModel:
    """Loads the URM checkpoint given as input ``model``, to be read as the parameters say."""
    reading = _READINGS[ctx.params.oracle]
    model = load_reward_model(
        ctx,
        # Weights that are not URM's are refused.
        lambda source, dtype: load_model(UrmModel, source, dtype=dtype, exactly=True),
        lambda output: to_verdicts(output, reading),
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    bos_id = model.tokenizer.bos_token_id
    if bos_id is not None and render_conversation(model.tokenizer, turns)[0] != bos_id:
        raise UserError(
            "conversations do not open with the BOS token "
            f"({model.tokenizer.bos_token!r}) that the reward model expects",
            "correct the tokenizer's chat template, or use the checkpoint's own tokenizer",
        )
    return model


def to_verdicts(output: UrmOutput, reading: Callable[[UrmOutput], Tensor]) -> list[OracleVerdict]:
    """One verdict for each conversation of a batch, with means and gate weights."""
    names = (*ATTRIBUTES, *(f"gate_{name}" for name in ATTRIBUTES))
    scores = reading(output).tolist()
    values = torch.cat([output.means, output.gates], dim=-1).tolist()
    verdicts = []
    for score, row in zip(scores, values, strict=True):
        verdicts.append(finite_verdict(score, dict(zip(names, row, strict=True))))
    return verdicts
