"""Prompts and settings of small runs of the generate stage."""

import pytest
import torch

from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm
from tests.tiny_models import WORDS, response_logprobs

TEXTS = [" ".join(WORDS[: 1 + index % 11]) + f" {WORDS[index // 11]}" for index in range(23)]
PARAMS = {
    "num_samples": 3,
    "max_new_tokens": 12,
    "dtype": "float32",
    "transformers": {"batch_size": 16},
}


def assert_logprobs(rows, policy, rounding):
    """Checks log-probabilities against a forward pass of each row alone, without padding."""
    source = ModelSource(str(policy))
    model = load_causal_lm(source, dtype="float32", device=torch.device("cpu"))
    for row in rows:
        expected = response_logprobs(model, row["prompt_token_ids"], row["response_token_ids"])
        assert row["response_logprobs"] == pytest.approx(expected.tolist(), abs=rounding)
