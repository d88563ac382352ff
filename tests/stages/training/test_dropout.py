"""Policy and reference differ by their weights only: no dropout is left in a model to train."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.training.policy import remove_dropout


def test_a_model_with_attention_dropout_answers_the_same_every_time() -> None:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.5,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.arange(12).reshape(1, 12)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    remove_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
