"""Checkpoints written whole: weights under the names and shapes that transformers expects."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Facts of the loading, which the library writes beside those of the tokenizer: the same tokenizer
# would have other bytes, and its checkpoint another digest, on a machine that is offline.
_OF_ITS_LOADING = ("is_local", "local_files_only")
MAX_SHARD_SIZE = "5GB"
"""Largest file of weights; a larger checkpoint has several, and an index."""


class IncompleteCheckpointError(RuntimeError):
    """A checkpoint was written that transformers would not load as the model it is of."""


def save_checkpoint(
    model: Any, weights: dict[str, Tensor], tokenizer: Any, dtype: torch.dtype, folder: Path
) -> None:
    """Writes a causal language model and its tokenizer, with its chat template.

    The model gives class and configuration, and its own weights may be sharded or have adapters;
    ``weights`` are saved in ``dtype``, by the names of the model without adapters.
    """
    cast = {
        name: weight.to(dtype) if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }
    # Tied weights must stay one tensor, or the checkpoint would hold them twice.
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name in cast and source in cast:
            cast[name] = cast[source]
    model.save_pretrained(folder, state_dict=cast, max_shard_size=MAX_SHARD_SIZE)
    # save_pretrained records the dtype in memory, which is not that of the saved weights.
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    _check(type(model), folder)


def update_kept(before: dict[str, Tensor], after: dict[str, Tensor], dtype: torch.dtype) -> float:
    """Share of an update that is left once the weights after it are rounded to ``dtype``.

    The update is u = after − before, the rounded one r; the share is ⟨r, u⟩ / ⟨u, u⟩, or
    ⟨r, u⟩ / ⟨r, r⟩ if rounding made the update larger. It is 1 if nothing was rounded off.
    """
    common = 0.0
    exact = 0.0
    left = 0.0
    for name, weight in after.items():
        if weight.is_floating_point():
            start = before[name].to(weight.device, torch.float64)
            update = weight.double() - start
            rounded = weight.to(dtype).double() - start
            common += (rounded * update).sum().item()
            exact += update.square().sum().item()
            left += rounded.square().sum().item()
    return common / max(exact, left) if exact else 1.0


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer and its chat template, the same bytes wherever it was loaded."""
    for name in _OF_ITS_LOADING:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def _check(model_class: Any, folder: Path) -> None:
    """Loads names and shapes alone, as transformers will, and compares them with the class's."""
    _, report = model_class.from_pretrained(
        folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
    )
    faults = {
        "missing": report["missing_keys"],
        "unknown": report["unexpected_keys"],
        "of another shape": {name for name, *_ in report["mismatched_keys"]},
    }
    named = [f"{kind}: {', '.join(sorted(names)[:5])}" for kind, names in faults.items() if names]
    if named:
        raise IncompleteCheckpointError(
            f"the saved weights are not those of {model_class.__name__} ({'; '.join(named)})"
        )
