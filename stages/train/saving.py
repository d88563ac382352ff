"""The trained policy as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from stages.contract.context import ModelSource
from stages.modeling.load import DTYPES, load_causal_lm
from stages.modeling.logprobs import causal_lm
from stages.modeling.save import save_tokenizer
from stages.train.params import LoraParams

_POLICY = "policy."


def policy_weights(state: dict[str, Tensor], lora: LoraParams) -> dict[str, Tensor]:
    """Names the weights of a `ResponseLogprobs` as the bare policy does, adapters merged.

    Args:
        state: Gathered weights of the wrapper.
        lora: The adapters that are in it.
    """
    weights = {
        name.removeprefix(_POLICY): weight
        for name, weight in state.items()
        if name.startswith(_POLICY)
    }
    return merge_adapters(weights, scale=lora.alpha / lora.rank) if lora.rank else weights


def merge_adapters(weights: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """W + scale · B A for every adapted layer of a peft model, under the base model's names."""
    merged = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if ".base_layer.weight" in name:
            layer = name.removesuffix("base_layer.weight")
            down = weights[f"{layer}lora_A.default.weight"].float()
            up = weights[f"{layer}lora_B.default.weight"].float()
            merged[plain] = weight.float() + scale * (up @ down)
        else:
            merged[plain] = weight
    return merged


def save_policy(
    policy: torch.nn.Module,
    weights: dict[str, Tensor],
    tokenizer: Any,
    dtype: str,
    folder: Path,
) -> None:
    """Writes weights, configurations, tokenizer and chat template.

    Args:
        policy: The model; its own weights may be sharded, ``weights`` are what is saved.
        weights: All weights by the model's names.
        tokenizer: The starting checkpoint's.
        dtype: Of the saved weights.
        folder: Where to.
    """
    model = causal_lm(policy)
    cast = {
        name: weight.to(DTYPES[dtype]) if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }
    # Tied weights must stay one tensor, or the checkpoint would hold them twice.
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in cast and source in cast:
            cast[name] = cast[source]
    model.save_pretrained(folder, state_dict=cast)
    # save_pretrained records the dtype in memory, which is not that of the saved weights.
    model.config.dtype = DTYPES[dtype]
    model.config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def save_average(
    reference: ModelSource,
    checkpoint: Path,
    tokenizer: Any,
    *,
    decay: float,
    dtype: str,
    folder: Path,
) -> None:
    """Writes decay · reference + (1 − decay) · trained policy, the next reference.

    Args:
        reference: This iteration's reference.
        checkpoint: The trained policy.
        tokenizer: Saved beside it.
        decay: Share of the reference that stays.
        dtype: Of the saved weights.
        folder: Where to.
    """
    # Under ZeRO-3 from_pretrained would go on sharding, and only one process is here.
    unset_hf_deepspeed_config()
    cpu = torch.device("cpu")
    average = load_causal_lm(reference, dtype="float32", device=cpu)
    trained = load_causal_lm(ModelSource(str(checkpoint)), dtype="float32", device=cpu)
    target = dict(trained.named_parameters())
    with torch.no_grad():
        for name, weight in average.named_parameters():
            weight.lerp_(target[name], 1.0 - decay)
    save_policy(average, average.state_dict(), tokenizer, dtype, folder)
