"""The trained policy as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.contract.context import ModelSource
from stages.modeling.load import DTYPES, load_causal_lm
from stages.modeling.logprobs import causal_lm
from stages.modeling.save import save_checkpoint
from stages.train.adapters import merge_adapters

_POLICY = "policy."


def policy_weights(policy: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names the weights of a `ResponseLogprobs` as the bare policy does, adapters merged.

    Args:
        policy: The model, or a peft model around it.
        state: Gathered weights of the wrapper.
    """
    weights = {
        name.removeprefix(_POLICY): weight
        for name, weight in state.items()
        if name.startswith(_POLICY)
    }
    return weights if causal_lm(policy) is policy else merge_adapters(policy, weights)


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
    cpu = torch.device("cpu")
    average = load_causal_lm(reference, dtype="float32", device=cpu)
    trained = load_causal_lm(ModelSource(str(checkpoint)), dtype="float32", device=cpu)
    target = dict(trained.named_parameters())
    with torch.no_grad():
        for name, weight in average.named_parameters():
            weight.lerp_(target[name], 1.0 - decay)
    save_checkpoint(average, average.state_dict(), tokenizer, DTYPES[dtype], folder)
