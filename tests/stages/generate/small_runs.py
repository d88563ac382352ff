"""Prompts and settings of small runs of the generate stage."""

import pytest
import torch

from tests.tiny_models import WORDS

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
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert row["response_logprobs"] == pytest.approx(expected.tolist(), abs=rounding)
