"""Floating-point operations of training steps, counted from a model's weights and tokens."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from stages.modeling.logprobs import causal_lm


def step_tflop(policy: nn.Module, record: Mapping[str, Any]) -> float:
    """Teraflop of a step, by its record in ``metrics.jsonl``."""
    per_token, per_response_token = flops_per_token(policy)
    shared = per_token * record["num_tokens_shared"]
    return (shared + per_response_token * record["num_response_tokens"]) / 1e12


def flops_per_token(policy: nn.Module) -> tuple[float, float]:
    """Floating-point operations of training for each token, and for each response token besides.

    Forward pass, gradient of the activations, gradient of the weights that are trained. Attention
    scores and what is computed twice are left out, as is usual when utilisation is stated.
    """
    model = causal_lm(policy)
    head = model.get_output_embeddings().weight
    looked_up = {id(model.get_input_embeddings().weight), id(head)}
    layers = [one for one in model.get_decoder().parameters() if id(one) not in looked_up]
    return sum(map(_flops, layers)), _flops(head)


def _flops(weight: nn.Parameter) -> float:
    # ZeRO-3 leaves an empty tensor where the weight was, and its shape as an attribute.
    shape = getattr(weight, "ds_shape", weight.shape)
    if len(shape) != 2:
        return 0.0
    return (6.0 if weight.requires_grad else 4.0) * math.prod(shape)
