"""Moved average of references and policies: the next reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.contract.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.modeling.save import save_checkpoint


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
    save_checkpoint(average, average.state_dict(), tokenizer, dtype, folder)
