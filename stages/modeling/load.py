"""Tokenizers and models of a checkpoint, whole or refused: safetensors only, no remote code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from stages.contract.context import ModelSource
from stages.contract.errors import UserError

Precision = Literal["float32", "bfloat16", "float16"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# One of these is in every checkpoint that has a tokenizer; without the check transformers makes up
# an empty tokenizer from the model's architecture.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def default_device() -> torch.device:
    """The first GPU where there is one, the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(source: ModelSource) -> Any:
    """Loads a checkpoint's tokenizer.

    Raises:
        UserError: There is no checkpoint, or it has no tokenizer.
    """
    folder = _local_folder(source)
    if folder is not None and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise UserError(
            f"the checkpoint {folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}",
            "save the tokenizer beside the weights (tokenizer.save_pretrained)",
        )
    try:
        return AutoTokenizer.from_pretrained(
            source.name_or_path, revision=source.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise _not_loadable("the tokenizer", source, error) from error


def require_same_tokenizer(policy: ModelSource, reference: ModelSource) -> None:
    """Checks that two models read token ids alike.

    Raises:
        UserError: Their vocabularies or special tokens differ.
    """
    ours, theirs = load_tokenizer(policy), load_tokenizer(reference)
    remedy = "use a reference with the policy's tokenizer: both read the same token ids"
    if ours.get_vocab() != theirs.get_vocab():
        differ = dict(ours.get_vocab().items() ^ theirs.get_vocab().items())
        raise UserError(
            f"the tokenizer of the policy {policy.name_or_path} and that of the reference "
            f"{reference.name_or_path} differ in {len(differ)} tokens: {_some(differ)}",
            remedy,
        )
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(ours, name) != getattr(theirs, name):
            raise UserError(
                f"{name} is {getattr(ours, name)} for the policy {policy.name_or_path} and "
                f"{getattr(theirs, name)} for the reference {reference.name_or_path}",
                remedy,
            )


def load_config(source: ModelSource) -> Any:
    """Loads a checkpoint's configuration.

    Raises:
        UserError: There is none.
    """
    try:
        return AutoConfig.from_pretrained(
            source.name_or_path, revision=source.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise _not_loadable("the configuration", source, error) from error


def load_causal_lm(
    source: ModelSource, *, dtype: Precision, device: torch.device | None = None
) -> Any:
    """Loads a causal language model in evaluation mode, with sdpa attention where it has that.

    Args:
        source: Folder or hub id.
        dtype: Type of the weights in memory.
        device: Where the weights go; :func:`default_device` if unset.

    Raises:
        UserError: There is no checkpoint, or weights of the model are missing from it.
    """
    return _load(AutoModelForCausalLM, source, dtype, device)


def merge_adapter(model: Any, adapter: Path) -> Any:
    """Merges a LoRA adapter into a causal language model, and returns it in evaluation mode.

    Raises:
        UserError: The adapter does not fit the model.
    """
    # Takes a second to import: only where there is an adapter.
    from peft import PeftModel

    try:
        merged = PeftModel.from_pretrained(model, str(adapter), torch_device=str(model.device))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the adapter {adapter} does not fit {type(model).__name__}: "
            f"{str(error).strip().splitlines()[0]}",
            "name the checkpoint that the adapter was trained on as the policy",
        ) from error
    return merged.merge_and_unload().eval()


def load_sequence_classifier(
    source: ModelSource,
    *,
    dtype: Precision,
    device: torch.device | None = None,
) -> Any:
    """Loads a sequence classifier (a reward model) in evaluation mode.

    Args and errors are those of :func:`load_causal_lm`; a checkpoint without a classification head
    is refused, where transformers would start the head at random.
    """
    return _load(AutoModelForSequenceClassification, source, dtype, device)


def load_exactly(
    model_class: Any,
    source: ModelSource,
    *,
    dtype: Precision,
    device: torch.device | None = None,
) -> Any:
    """Loads a model of a class of our own, whose weights must be exactly the checkpoint's.

    Args and errors are those of :func:`load_causal_lm`; besides, a checkpoint with weights that
    the class does not know, or with other shapes, is refused.
    """
    return _load(model_class, source, dtype, device, exactly=True)


def context_tokens(config: Any, wanted: int | None, source: ModelSource) -> int:
    """Most tokens that a model shall read at once.

    Args:
        config: The model's configuration.
        wanted: ``max_length_tokens`` of the request; None takes all that the model can.
        source: The checkpoint, for the message.

    Raises:
        UserError: More is wanted than the model has, or nothing says how much it has.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is not None and longest is not None and wanted > longest:
        raise UserError(
            f"max_length_tokens is {wanted}, the context of {source.name_or_path} is {longest}",
            f"set max_length_tokens to {longest} or less",
        )
    limit = wanted or longest
    if limit is None:
        raise UserError(
            f"the configuration of {source.name_or_path} names no context length",
            "set max_length_tokens",
        )
    return limit


def _load(
    auto_class: Any,
    source: ModelSource,
    dtype: Precision,
    device: torch.device | None,
    *,
    exactly: bool = False,
) -> Any:
    _check_weights(source)
    try:
        model, report = auto_class.from_pretrained(
            source.name_or_path,
            revision=source.revision,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Otherwise transformers raises at the first one and names no other.
            ignore_mismatched_sizes=exactly,
        )
    except (OSError, ValueError) as error:
        raise _not_loadable("the model", source, error) from error
    faults = {"lacks": report["missing_keys"]}
    if exactly:
        faults["has besides"] = report["unexpected_keys"]
        faults["has in other shapes"] = {name for name, *_ in report["mismatched_keys"]}
    for verb, names in faults.items():
        if names:
            raise UserError(
                f"the checkpoint {source.name_or_path} {verb} {len(names)} weights of "
                f"{type(model).__name__}: {_some(names)}",
                "pass a whole checkpoint of the right kind of model",
            )
    return model.to(device or default_device()).eval()


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", …" if len(listed) > 5 else "")


def _check_weights(source: ModelSource) -> None:
    folder = _local_folder(source)
    if folder is None:
        return
    if not (folder / "config.json").exists():
        raise UserError(
            f"{folder} is no checkpoint: it has no config.json",
            "pass a folder written by save_pretrained",
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"the checkpoint {folder} has no weights in safetensors format",
            "save the model with save_pretrained; pickled weights (.bin, .pt) are never loaded",
        )


def _local_folder(source: ModelSource) -> Path | None:
    """The folder that ``source`` names, or None for a hub id."""
    folder = Path(source.name_or_path)
    if folder.is_dir():
        return folder
    if source.revision is None:
        raise UserError(f"no such checkpoint: {folder}", "check the path")
    return None


def _not_loadable(what: str, source: ModelSource, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UserError(
        f"{what} of {source.name_or_path} cannot be loaded: {reason}",
        "pass a folder or hub id that transformers can load without remote code",
    )
