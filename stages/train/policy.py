"""Policy and reference, loaded for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from stages.contract.context import ModelSource
from stages.contract.errors import UserError
from stages.modeling.load import load_causal_lm
from stages.modeling.logprobs import ResponseLogprobs, head_is_plain
from stages.modeling.shared_prefix import (
    SHARED_PREFIX,
    UnsupportedAttentionError,
    supports_shared_prefix,
)
from stages.train.numerics import Numerics
from stages.train.params import LoraParams, RowLayoutName


def load_logprob_model(
    source: ModelSource, numerics: Numerics, row_layout: RowLayoutName
) -> ResponseLogprobs:
    """Loads a causal language model whose forward pass gives log-probabilities.

    Args:
        source: Folder or hub id.
        numerics: Device and dtypes.
        row_layout: Of the rows that it is to compute.

    Raises:
        UserError: There is no such model, its logits are not a plain linear head's, or it cannot
            compute such rows.
    """
    model = load_causal_lm(
        source,
        dtype=numerics.weights,
        device=numerics.device,
        attention=SHARED_PREFIX if row_layout == "packed" else "sdpa",
    )
    if row_layout == "packed" and not supports_shared_prefix(model):
        raise _cannot_share_prompts(source, f"{type(model).__name__} has another attention")
    remove_dropout(model)
    try:
        wrapped = ResponseLogprobs(model)
    except ValueError as error:
        raise _unusable_head(source, str(error)) from error
    try:
        plain = head_is_plain(model)
    except UnsupportedAttentionError as error:
        raise _cannot_share_prompts(source, str(error)) from error
    if not plain:
        raise _unusable_head(source, "its logits are capped or scaled after the head")
    return wrapped


def remove_dropout(model: nn.Module) -> None:
    """Sets every dropout to 0: policy and reference must differ by their weights only."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention modules of transformers keep theirs as a plain number.
        attributes = vars(module)
        if isinstance(attributes.get("attention_dropout"), float):
            attributes["attention_dropout"] = 0.0


def checkpoint_dtype(source: ModelSource) -> str:
    """Dtype that a checkpoint says its weights have; float32 where it says none."""
    config = AutoConfig.from_pretrained(
        source.name_or_path, revision=source.revision, trust_remote_code=False
    )
    return "bfloat16" if config.dtype == torch.bfloat16 else "float32"


def add_adapters(model: Any, params: LoraParams) -> Any:
    """Wraps a model in LoRA adapters; its own weights are frozen.

    Raises:
        UserError: The model has no layers of the names given.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,
        lora_dropout=params.dropout,
        target_modules=list(params.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UserError(
            f"lora.target_modules = {list(params.target_modules)}: {error}",
            "name linear layers of the model, such as q_proj and v_proj",
        ) from error


def _cannot_share_prompts(source: ModelSource, reason: str) -> UserError:
    return UserError(
        f"the prompts of pairs cannot be shared by {source.name_or_path}: {reason}",
        "set train.row_layout=padded",
    )


def _unusable_head(source: ModelSource, reason: str) -> UserError:
    return UserError(
        f"log-probabilities of {source.name_or_path} cannot be computed: {reason}",
        "use a model of the Llama, Mistral or Qwen families",
    )
