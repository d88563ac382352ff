"""Moved average of references and policies: the next reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stages.contract.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.modeling.save import save_checkpoint
from stages.training.policy import checkpoint_dtype


def save_average(
    reference: ModelSource,
    checkpoint: Path,
    tokenizer: Any,
    *,
    decay: float,
    dtype: torch.dtype,
    folder: Path,
) -> None:
    """Writes decay · reference + (1 − decay) · trained policy, the next reference.

    One model is in memory; of the other one weight at a time. Each weight is averaged in float32.

    Args:
        reference: This iteration's reference.
        checkpoint: The trained policy.
        tokenizer: Saved beside it.
        decay: Share of the reference that stays.
        dtype: Of the saved weights.
        folder: Where to.
    """
    low = dtype == checkpoint_dtype(reference) == torch.bfloat16
    cpu = torch.device("cpu")
    average = load_causal_lm(reference, dtype="bfloat16" if low else "float32", device=cpu)
    with torch.no_grad(), ExitStack() as files:
        trained = _weights(checkpoint, average, files)
        for name, weight in average.named_parameters():
            # In place where the model is float32; else of a copy of this weight.
            weight.copy_(weight.float().lerp_(trained(name).float(), 1.0 - decay))
    save_checkpoint(average, average.state_dict(), tokenizer, dtype, folder)


def _weights(checkpoint: Path, like: Any, files: ExitStack) -> Callable[[str], Tensor]:
    """Gives a checkpoint's weights by the names of a model of its class."""
    places: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, framework="pt"))
        places |= dict.fromkeys(file.keys(), file)
    if all(name in places for name, _ in like.named_parameters()):
        return lambda name: places[name].get_tensor(name)
    # Of families whose checkpoints have other names (fused experts), transformers knows which.
    source = ModelSource(str(checkpoint))
    low = checkpoint_dtype(source) == torch.bfloat16
    cpu = torch.device("cpu")
    loaded = load_causal_lm(source, dtype="bfloat16" if low else "float32", device=cpu)
    weights = dict(loaded.named_parameters())
    return lambda name: weights[name]
