"""Log-probabilities of a model whose weights lie in shards, one for each process (ZeRO-3).

Every forward pass is collective: all processes make as many, each on rows of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from stages.contract.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.modeling.logprobs import ResponseLogprobs
from stages.training.adapters import wear_adapters
from stages.training.numerics import Numerics
from stages.training.params import TrainingParams
from stages.training.policy import check_model, remove_dropout


@contextmanager
def sharded_logprob_model(
    source: ModelSource, params: TrainingParams, numerics: Numerics
) -> Iterator[nn.Module]:
    """A model for forward passes without gradients; its shards are released after the block.

    It draws no random numbers of the training's, which so is the same where no pass is needed.

    Args:
        source: Folder or hub id; an adapter on it is worn.
        params: Say how rows are laid out and where parameters may lie.
        numerics: Device and dtypes.

    Raises:
        UserError: There is no such model, or what it computes would not be those of its rows.
    """
    devices = [numerics.device] if numerics.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _sharded(source, params, numerics) as engine:
        yield engine


@contextmanager
def _sharded(
    source: ModelSource, params: TrainingParams, numerics: Numerics
) -> Iterator[nn.Module]:
    import deepspeed

    config = _inference_config(params, numerics)
    # transformers shards what it loads for as long as this lives.
    sharding = HfDeepSpeedConfig(config)
    try:
        base = replace(source, adapter=None)
        model = load_causal_lm(base, dtype=numerics.weights, device=numerics.device)
        remove_dropout(model)
        if source.adapter is None:
            module = ResponseLogprobs(model)
        else:
            worn = wear_adapters(model, params.lora, Path(source.adapter))
            module = ResponseLogprobs(worn)
    finally:
        del sharding
        unset_hf_deepspeed_config()
    engine, *_ = deepspeed.initialize(model=module, config=config)
    try:
        check_model(model, params.row_layout, place=source.name_or_path, stage=params.stage)
        engine.eval()
        yield engine
    finally:
        engine.destroy()
        _release(module)


def _inference_config(params: TrainingParams, numerics: Numerics) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3}
    if params.deepspeed.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": numerics.device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": numerics.bfloat16},
        "steps_per_print": 2**31,
    }


def _release(module: nn.Module) -> None:
    """Gives the weights' memory back: DeepSpeed's own lists keep the module itself."""
    for weight in module.parameters():
        # DeepSpeed adds its attributes to torch's parameters.
        sharded: Any = weight
        sharded.data = torch.empty(0)
        sharded.ds_tensor.data = torch.empty(0)
    gc.collect()
