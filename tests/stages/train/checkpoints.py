"""Contents of checkpoints that the train stage wrote."""

from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.tables.schemas import PAIRS, read_rows
from tests.tiny_models import response_logprobs


def assert_same_training(training, expected, tolerance=1e-4, *, curves=()):
    """Same curves, same names, and the same weights within float tolerance."""
    assert training.losses == pytest.approx(expected.losses, rel=tolerance, abs=tolerance)
    for name in curves:
        curve = [record[name] for record in training.records]
        assert curve == pytest.approx([record[name] for record in expected.records], rel=1e-2), name
    weights, others = training.tensors, expected.tensors
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=tolerance, atol=tolerance, msg=name)


def first_logprob(checkpoint, pairs, token):
    """Mean log π(token | prompt) over the pairs' prompts."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = [row["prompt_token_ids"] for row in read_rows(pairs, PAIRS)]
    return fmean(response_logprobs(model, prompt, [token]).item() for prompt in prompts)
