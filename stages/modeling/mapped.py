"""Models whose weights stay in their files, as memory mapped from them.

Processes of one host share such memory, and the system takes it back where room is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from stages.contract.context import ModelSource
from stages.contract.file_locks import exclusive_lock
from stages.contract.request import Resources
from stages.modeling.checkpoint_files import check_weight_files, explained, local_folder
from stages.modeling.file_backed import new_file
from stages.modeling.load import DTYPES, Precision, load_causal_lm, load_sequence_classifier

# Names of safetensors for dtypes in which transformers takes a tensor as it lies in its file.
_STORED: dict[str, Precision] = {"F32": "float32", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Kind:
    """Kind of model.

    Attributes:
        load: Loads one of a checkpoint.
        auto: transformers' class for it.
    """

    load: Callable[..., Any]
    auto: Any


CAUSAL_LM = Kind(load_causal_lm, AutoModelForCausalLM)
CLASSIFIER = Kind(load_sequence_classifier, AutoModelForSequenceClassification)


def folder_to_share(resources: Resources, scratch: Path) -> TemporaryDirectory[str] | None:
    """Folder for :func:`load_shared`, for as long as processes load; None where none is shared.

    Args:
        resources: Those of the stage: several processes on a CPU can share weights.
        scratch: Parent of the folder, on a disk with room for the weights in float32.
    """
    if resources.gpus or resources.processes == 1:
        return None
    return TemporaryDirectory(prefix=".weights-", dir=scratch)


def load_shared(
    source: ModelSource, *, dtype: Precision, folder: str | None, kind: Kind = CAUSAL_LM
) -> Any:
    """Loads a model whose weights the processes of a stage have in memory once.

    Weights of the dtype asked for stay in the checkpoint's files. Those in bfloat16 that shall be
    float32 are cast into files of the folder by the first process that comes, and read there by
    all. Other casts, and weights with an adapter, are each process's own.

    Args:
        source: Folder or hub id.
        dtype: Type of the weights in memory.
        folder: The same for all processes; may go when they have loaded. None: nothing is shared.
        kind: Kind of model.

    Raises:
        UserError: As :func:`load_causal_lm`.
    """
    if folder is None or dtype != "float32" or source.adapter is not None:
        return kind.load(source, dtype=dtype)
    model = load_mapped(source, dtype=dtype, kind=kind)
    place = Path(folder)
    with exclusive_lock(place / "lock"):
        for number, weight in enumerate(model.parameters()):
            if weight.dtype != DTYPES[dtype]:
                weight.data = _shared(weight.data, DTYPES[dtype], place / f"{number}.weight")
    model.config.dtype = DTYPES[dtype]
    return model


def _shared(weight: Tensor, dtype: torch.dtype, path: Path) -> Tensor:
    """A weight of another dtype, in the file that holds it or comes to hold it."""
    if not weight.numel():
        return weight.to(dtype)
    if not path.exists():
        partial = path.with_suffix(".partial")
        new_file(partial, weight.numel(), dtype).copy_(weight.reshape(-1))
        partial.rename(path)
    # Not shared for writing: a process that changed a weight would do so for itself.
    whole = torch.from_file(str(path), shared=False, size=weight.numel(), dtype=dtype)
    return whole.view(weight.shape)


def load_mapped(source: ModelSource, *, dtype: Precision, kind: Kind = CAUSAL_LM) -> Any:
    """Loads a model on the CPU; parameters may have the files' dtype in place of the one asked for.

    Cast to ``dtype``, they are what :func:`load_causal_lm` gives. Buffers are of ``dtype`` at once.
    Weights that transformers makes of several of the checkpoint's (fused experts) are copies.

    Args:
        source: Folder or hub id, without an adapter.
        dtype: Type in which the model is to compute; taken for the parameters, too, where the
            files have several types, or one that holds fewer numbers than either.
        kind: Kind of model.

    Raises:
        UserError: As :func:`load_causal_lm`.
    """
    cpu = torch.device("cpu")
    stored = _stored_dtype(source)
    if stored is None or stored == dtype:
        return kind.load(source, dtype=dtype, device=cpu)
    model = kind.load(source, dtype=stored, device=cpu)
    # Here: vLLM's environment, whose reward models need nothing of this module, does not have it.
    from accelerate import init_empty_weights

    # Constants that a model computes when it is made are rounded to its dtype (Gemma's scale).
    with init_empty_weights(include_buffers=False):
        like = kind.auto.from_config(model.config, dtype=DTYPES[dtype])
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
