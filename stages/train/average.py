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
from stages.modeling.file_backed import in_files
from stages.modeling.mapped import load_mapped
from stages.modeling.save import save_checkpoint

# Of a weight, averaged at once: the copies in float32 stay small.
_NUMBERS = 1 << 20


def save_average(
    reference: ModelSource,
    checkpoint: Path,
    tokenizer: Any,
    *,
    decay: float,
    dtype: torch.dtype,
    folder: Path,
    work: Path,
) -> None:
    """Writes decay · reference + (1 − decay) · trained policy, the next reference.

    No model is whole in this process's own memory: weights are read from the files of both, some
    numbers at a time, averaged in float32, and put into files until they are written.

    Args:
        reference: This iteration's reference.
        checkpoint: The trained policy.
        tokenizer: Saved beside it.
        decay: Share of the reference that stays.
        dtype: Of the saved weights.
        folder: Where to.
        work: For the files, which go with this call.
    """
    average = load_mapped(reference, dtype="float32")
    place = in_files(work)
    averaged: dict[int, Tensor] = {}
    with torch.no_grad(), ExitStack() as files:
        trained = _weights(checkpoint, average, files)
        for name, weight in average.named_parameters():
            averaged[id(weight)] = whole = place(weight.shape, dtype)
            flat = (each.reshape(-1).split(_NUMBERS) for each in (whole, weight, trained(name)))
            for target, old, new in zip(*flat, strict=True):
                target.copy_(old.float().lerp(new.float(), 1.0 - decay))
    state = average.state_dict(keep_vars=True)
    weights = {name: averaged.get(id(weight), weight) for name, weight in state.items()}
    save_checkpoint(average, weights, tokenizer, dtype, folder)


def _weights(checkpoint: Path, like: Any, files: ExitStack) -> Callable[[str], Tensor]:
    """Gives a checkpoint's weights by the names of a model of its class."""
    places: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, framework="pt"))
        places |= dict.fromkeys(file.keys(), file)
    if all(name in places for name, _ in like.named_parameters()):
        return lambda name: places[name].get_tensor(name)
    # Of families whose checkpoints have other names (fused experts), transformers knows which.
    loaded = load_mapped(ModelSource(str(checkpoint)), dtype="float32")
    weights = dict(loaded.named_parameters())
    return lambda name: weights[name]
