"""Policy and reference, loaded for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from stages.contract.context import ModelSource
from stages.contract.errors import UserError
from stages.modeling.load import load_causal_lm, load_config
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.mapped import load_mapped
from stages.modeling.probe import (
    UnfitModelError,
    check_gradients,
    check_logprobs,
    check_training_mode,
    share_prompts,
)
from stages.training.numerics import Numerics
from stages.training.params import RowLayoutName, TrainingParams

# Draws experts in training mode, and has no setting that forbids it.
_SAMPLING_ROUTER = "PhimoeTopKRouter"
# Factors that a router draws around 1 in training; elsewhere such a name may be a threshold.
_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def load_logprob_model(
    source: ModelSource, params: TrainingParams, numerics: Numerics
) -> ResponseLogprobs:
    """Loads a causal language model whose forward pass gives log-probabilities.

    For FSDP2, which shards it then, it is on the CPU, its weights in their files where they can be.

    Args:
        source: Folder or hub id, without an adapter.
        params: Those of the stage.
        numerics: Device and dtypes.

    Raises:
        UserError: There is no such model, or what it computes would not be those of its rows.
    """
    if params.sharding != "fsdp2":
        model = load_causal_lm(source, dtype=numerics.weights, device=numerics.device)
    elif params.lora.rank:
        # peft draws adapters in the dtype of the weights.
        model = load_causal_lm(source, dtype=numerics.weights, device=torch.device("cpu"))
    else:
        model = load_mapped(source, dtype=numerics.weights)
    return logprob_model(model, params.row_layout, place=source.name_or_path, stage=params.stage)


def logprob_model(
    model: Any, row_layout: RowLayoutName, *, place: str, stage: str
) -> ResponseLogprobs:
    """Makes a causal language model give log-probabilities, without dropout.

    Args:
        model: A causal language model of transformers.
        row_layout: Of the rows that it is to compute.
        place: Its checkpoint, for messages.
        stage: Name of the stage, for messages.

    Raises:
        UserError: What it computes would not be those of its rows.
    """
    remove_dropout(model)
    check_model(model, row_layout, place=place, stage=stage)
    return ResponseLogprobs(model)


def check_model(model: Any, row_layout: RowLayoutName, *, place: str, stage: str) -> None:
    """Checks that a model without dropout gives the log-probabilities of its rows.

    Packed rows get the attention that they need.

    Args:
        model: A causal language model of transformers.
        row_layout: Of the rows that it is to compute.
        place: Its checkpoint, for messages.
        stage: Name of the stage, for messages.

    Raises:
        UserError: What it computes would not be those of its rows.
    """
    try:
        check_logprobs(model)
        check_training_mode(model)
    except UnfitModelError as error:
        raise UserError(
            f"log-probabilities of {place} cannot be computed: {error}",
            "use a model of the Llama, Mistral or Qwen families",
        ) from error
    if row_layout == "packed":
        try:
            share_prompts(model)
        except UnfitModelError as error:
            raise UserError(
                f"samples cannot be packed into one row for {place}: {error}",
                f"set {stage}.row_layout=padded",
            ) from error


def remove_dropout(model: nn.Module) -> None:
    """Sets dropout and router noise to 0: policy and reference differ by their weights only."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # Layers of transformers keep theirs as plain numbers.
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name in _NOISE):
                setattr(module, name, 0.0)
        if type(module).__name__ == _SAMPLING_ROUTER:
            # As an instance's own attribute, so that `train` of the whole model leaves it alone.
            vars(module.eval())["train"] = lambda mode=True, router=module: router


def enable_gradient_checkpointing(policy: nn.Module, *, stage: str) -> None:
    """Has the backward pass compute activations again.

    Raises:
        UserError: The model cannot.
    """
    model = causal_lm(policy)
    remedy = f"set {stage}.gradient_checkpointing=false"
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} has no gradient checkpointing", remedy)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        check_gradients(model)
    except UnfitModelError as error:
        raise UserError(
            f"{type(model).__name__} with gradient checkpointing: {error}", remedy
        ) from error


def checkpoint_dtype(source: ModelSource) -> torch.dtype:
    """Dtype that a checkpoint says its weights have; float32 where it says none."""
    return torch.bfloat16 if load_config(source).dtype == torch.bfloat16 else torch.float32
