"""Choices that depend on the device: compiled layers, activations, the size of micro-batches."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stages.harness.context import ModelSource
from stages.train.params import TrainParams
from stages.training.policy import (
    Numerics,
    load_logprob_model,
    pays_to_compile,
    with_memory_choices,
)
from tests.tiny_models import make_tiny_llama


def params(**settings):
    return TrainParams(design="none", kappa=0.0, **settings)


def model_of(layers, width, weights, *, trained, dtype):
    """A policy of a size, without memory."""
    policy = nn.Module()
    weight = torch.empty(weights, device="meta", dtype=dtype)
    policy.weight = nn.Parameter(weight, requires_grad=trained)
    config = SimpleNamespace(num_hidden_layers=layers, hidden_size=width)
    policy.config = SimpleNamespace(get_text_config=lambda: config)
    return policy


LARGE = model_of(32, 4096, 8 * 10**9, trained=False, dtype=torch.bfloat16)
SMALL = model_of(16, 2048, 1240 * 10**6, trained=True, dtype=torch.float32)


@pytest.mark.parametrize(
    ("policy", "memory_gib", "compiled", "settings", "choice"),
    [
        (LARGE, 139, True, {}, (False, 16384)),
        (LARGE, 139, False, {}, (True, 8192)),
        (LARGE, 78, True, {}, (True, 8192)),
        (LARGE, 78, True, {"micro_batch_tokens": 4096}, (False, 4096)),
        (LARGE, 78, True, {"gradient_checkpointing": False}, (False, 8192)),
        (SMALL, 78, False, {}, (False, 16384)),
        (SMALL, 40, True, {}, (True, 8192)),
        # The CPU, and DeepSpeed.
        (SMALL, None, False, {}, (True, 8192)),
        (SMALL, None, False, {"gradient_checkpointing": False}, (False, 8192)),
    ],
)
def test_activations_are_kept_where_memory_should_do(
    policy, memory_gib, compiled, settings, choice
):
    memory = memory_gib and memory_gib * 2**30
    chosen = with_memory_choices(params(**settings), policy, memory, compiled=compiled)
    assert (chosen.gradient_checkpointing, chosen.token_budget) == choice


@pytest.mark.parametrize(
    ("settings", "tokens", "on_gpu", "pays"),
    [
        ({}, 2_000_000, True, True),
        ({}, 1_999_999, True, False),
        ({}, 10**9, False, False),
        ({"compile_layers": False}, 10**9, True, False),
        ({"compile_layers": True}, 1, False, True),
        ({"compile_layers": True, "deepspeed": {"zero_stage": 2}}, 10**9, True, False),
    ],
    ids=str,
)
def test_layers_are_compiled_on_a_gpu_in_long_trainings(settings, tokens, on_gpu, pays):
    assert pays_to_compile(params(**settings), tokens, on_gpu=on_gpu) == pays


def test_a_model_is_checked_in_the_numbers_of_its_training(tmp_path):
    settings = params(precision="bfloat16")
    dtypes = set()

    def note(module, inputs, output):
        if isinstance(module, nn.Linear):
            dtypes.add(output.dtype)

    numerics = Numerics.of(settings, on_gpu=False, local_rank=0)
    hook = nn.modules.module.register_module_forward_hook(note)
    with hook:
        load_logprob_model(ModelSource(str(make_tiny_llama(tmp_path))), settings, numerics)
    assert dtypes == {torch.bfloat16}
