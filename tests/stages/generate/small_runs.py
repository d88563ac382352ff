"""Prompts and settings of small runs of the generate stage."""

import pytest
import torch

from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.training.adapters import add_adapters, save_adapters
from stages.training.params import LoraParams
from tests.tiny_models import WORDS, response_logprobs

TEXTS = [" ".join(WORDS[: 1 + index % 11]) + f" {WORDS[index // 11]}" for index in range(23)]
PARAMS = {
    "num_samples": 3,
    "max_new_tokens": 12,
    "dtype": "float32",
    "transformers": {"batch_size": 16},
}


def assert_logprobs(rows, model, rounding):
    """Checks log-probabilities against a forward pass of each row alone, without padding."""
    for row in rows:
        expected = response_logprobs(model, row["prompt_token_ids"], row["response_token_ids"])
        assert row["response_logprobs"] == pytest.approx(expected.tolist(), abs=rounding)


def save_tiny_adapters(folder, base):
    """Writes adapters of all linear layers that change what the checkpoint ``base`` answers."""
    source = ModelSource(str(base))
    policy = add_adapters(load_causal_lm(source, dtype="float32"), LoraParams(rank=4, alpha=8.0))
    torch.manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    save_adapters(policy, policy.state_dict(), source, folder)
    return folder
