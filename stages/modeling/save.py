"""Checkpoints written whole: weights under the names and shapes that transformers expects."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

# Facts of the loading, which the library writes, too. A machine that is offline would write others,
# and so another digest.
_OF_ITS_LOADING = ("is_local", "local_files_only")
MAX_SHARD_SIZE = "5GB"
"""Largest file of weights; a larger checkpoint has several, and an index."""


def save_checkpoint(model: Any, weights: dict[str, Tensor], tokenizer: Any, folder: Path) -> None:
    """Writes a causal language model and its tokenizer, with its chat template.

    The model gives class and configuration, and its own weights may be sharded or have adapters;
    ``weights`` are saved in float32, by the names of the model without adapters. Most updates are
    too small for weights of 16 bits.
    """
    cast = {
        name: weight.float() if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }
    # Tied weights must stay one tensor, or the checkpoint would hold them twice.
    for name, source in model.all_tied_weights_keys.items():
        if name in cast and source in cast:
            cast[name] = cast[source]
    settings = model.generation_config
    if not _is_valid(settings):
        # Settings of sampling without `do_sample` are loaded with a warning, and never saved.
        settings.do_sample = True
        if not _is_valid(settings):
            model.generation_config = GenerationConfig(
                bos_token_id=settings.bos_token_id, eos_token_id=settings.eos_token_id
            )
    model.save_pretrained(folder, state_dict=cast, max_shard_size=MAX_SHARD_SIZE)
    # save_pretrained records the dtype in memory, not the dtype of the saved weights.
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    for name in _OF_ITS_LOADING:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def _is_valid(settings: GenerationConfig) -> bool:
    """True if transformers would save these settings."""
    try:
        settings.validate(strict=True)
    except ValueError:
        return False
    return True
