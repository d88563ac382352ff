"""Causal language models whose weights stay in their files, as memory mapped from them.

Processes of one host share such memory, and the system takes it back where room is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from stages.contract.context import ModelSource
from stages.modeling.checkpoint_files import check_weight_files, explained, local_folder
from stages.modeling.load import DTYPES, Precision, load_causal_lm

# Names of safetensors for dtypes in which transformers takes a tensor as it lies in its file.
_STORED: dict[str, Precision] = {"F32": "float32", "BF16": "bfloat16"}


def load_mapped(source: ModelSource, *, dtype: Precision) -> Any:
    """Loads a model on the CPU; parameters may have the files' dtype in place of the one asked for.

    Cast to ``dtype``, they are what :func:`load_causal_lm` gives. Buffers are of ``dtype`` at once.
    Weights that transformers makes of several of the checkpoint's (fused experts) are copies.

    Args:
        source: Folder or hub id, without an adapter.
        dtype: Type in which the model is to compute; taken for the parameters, too, where the
            files have several types, or one that holds fewer numbers than either.

    Raises:
        UserError: As :func:`load_causal_lm`.
    """
    cpu = torch.device("cpu")
    stored = _stored_dtype(source)
    if stored is None or stored == dtype:
        return load_causal_lm(source, dtype=dtype, device=cpu)
    model = load_causal_lm(source, dtype=stored, device=cpu)
    # Constants that a model computes when it is made are rounded to its dtype (Gemma's scale).
    with init_empty_weights(include_buffers=False):
        like = AutoModelForCausalLM.from_config(model.config, dtype=DTYPES[dtype])
    read = model.state_dict().keys()
    for name, buffer in like.named_buffers():
        owner, _, leaf = name.rpartition(".")
        wanted = model.get_buffer(name).to(buffer.dtype) if name in read else buffer
        setattr(model.get_submodule(owner), leaf, wanted)
    return model


def _stored_dtype(source: ModelSource) -> Precision | None:
    """The dtype of all tensors in the checkpoint's files; None where there are several or others.

    Raises:
        UserError: A file is missing or damaged.
    """
    check_weight_files(source)
    with explained("the model", source):
        found = set()
        for path in _weight_files(source):
            with safe_open(path, framework="pt") as file:
                names = file.keys()
                found |= {file.get_slice(name).get_dtype() for name in names}
    return _STORED.get(found.pop()) if len(found) == 1 else None


def _weight_files(source: ModelSource) -> list[Path]:
    """Files of a checkpoint; those of a hub are downloaded where they are not here yet."""
    folder = local_folder(source)
    if folder is not None:
        return sorted(folder.glob("*.safetensors"))
    name, revision = source.name_or_path, source.revision
    optional = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **optional)
    if index is None:
        return [Path(str(cached_file(name, SAFE_WEIGHTS_NAME, revision=revision)))]
    files, _ = get_checkpoint_shard_files(name, index, revision=revision)
    return [Path(each) for each in files]
