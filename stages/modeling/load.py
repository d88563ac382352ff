"""Models of a checkpoint, whole or refused: safetensors only, no remote code."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from stages.contract.checkpoints import check_config_files, check_weight_files
from stages.contract.errors import UserError
from stages.contract.number_types import NumberType
from stages.harness.context import ModelSource
from stages.modeling.checkpoint_files import (
    checkpoint_folder,
    explained,
    is_finite,
    some_of,
)

# Bars fill a log; stages report their own progress.
logging.disable_progress_bar()

# cuDNN builds a plan for each new length on the host, for a tenth of a second (H200): far longer
# than the attention itself, whose rows have all lengths here.
torch.backends.cuda.enable_cudnn_sdp(False)

DTYPES: dict[NumberType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def default_device() -> torch.device:
    """The first GPU if there is one, the CPU otherwise."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model_config(source: ModelSource) -> Any:
    """Loads a checkpoint's configuration; tied only if the weights have no other head."""
    if (folder := checkpoint_folder(source)) is not None:
        check_config_files(folder)
    with explained("the configuration", source):
        config = AutoConfig.from_pretrained(
            source.name_or_path, revision=source.revision, trust_remote_code=False
        )
        if _has_own_head(source, config):
            config.tie_word_embeddings = False
            config.get_text_config().tie_word_embeddings = False
    return config


def load_causal_lm(
    source: ModelSource, *, dtype: NumberType, device: torch.device | None = None
) -> Any:
    """Loads a causal language model in evaluation mode, with sdpa attention if that computes it.

    The weights have ``dtype`` in memory, on :func:`default_device` if ``device`` is unset.

    Raises:
        UserError: The checkpoint or some of its weights are missing, weights have other shapes, one
            is not a finite number.
    """
    return load_model(AutoModelForCausalLM, source, dtype=dtype, device=device)


def context_tokens(config: Any, wanted: int | None, source: ModelSource) -> int:
    """Most tokens that a model shall read at once: those ``wanted``, or all that it can.

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


def _has_own_head(source: ModelSource, config: Any) -> bool:
    """True if the weights hold a head unlike the embeddings, whatever the configuration says.

    Engines would drop that head: vLLM, and transformers under ZeRO-3.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return False
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for name, other_name in (getattr(model_class, "_tied_weights_keys", None) or {}).items():
        head = _stored_weight(source, name)
        embeddings = None if head is None else _stored_weight(source, other_name)
        if head is not None and embeddings is not None and not torch.equal(head, embeddings):
            return True
    return False


def _stored_weight(source: ModelSource, name: str) -> torch.Tensor | None:
    """A weight as a checkpoint's file has it; None if there is none of that name."""
    quiet = {"revision": source.revision, "_raise_exceptions_for_missing_entries": False}
    place = cached_file(source.name_or_path, SAFE_WEIGHTS_NAME, **quiet)
    if place is None:
        index = cached_file(source.name_or_path, SAFE_WEIGHTS_INDEX_NAME, **quiet)
        shards = json.loads(Path(index).read_text())["weight_map"] if index else {}
        place = name in shards and cached_file(source.name_or_path, shards[name], **quiet)
    if not place:
        return None
    with safe_open(place, framework="pt") as file:
        return file.get_tensor(name) if name in set(file.keys()) else None


def load_model(
    auto_class: Any,
    source: ModelSource,
    *,
    dtype: NumberType,
    device: torch.device | None = None,
    exactly: bool = False,
) -> Any:
    """Loads a model of a class as :func:`load_causal_lm` does; missing weights are refused.

    transformers would start them at random, as a reward model's head. With ``exactly``, weights
    that the class does not know are refused, too.
    """
    config = load_model_config(source)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # sdpa would leave the cap out (Gemma 2, VaultGemma).
        config._attn_implementation = "eager"
    if (folder := checkpoint_folder(source)) is not None:
        check_weight_files(folder)
    # Without it transformers raises at the first weight of another shape and names no other; but
    # under ZeRO-3 no weight has its shape while it is loaded.
    names_shapes = exactly or not is_deepspeed_zero3_enabled()
    with explained("the model", source):
        model, report = auto_class.from_pretrained(
            source.name_or_path,
            config=config,
            revision=source.revision,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=names_shapes,
        )
    faults = {
        "lacks": report["missing_keys"],
        "has in other shapes than its config.json says": {
            f"{name} {list(stored)} for {list(expected)}"
            for name, stored, expected in report["mismatched_keys"]
        },
    }
    other = set(report["unexpected_keys"])
    # With tied embeddings, a reward model lacks nothing of a language model.
    faults["has besides"] = other if exactly else other & {"score.weight"}
    for verb, names in faults.items():
        if names:
            raise UserError(
                f"the checkpoint {source.name_or_path} {verb} {len(names)} weights of "
                f"{type(model).__name__}: {some_of(names)}",
                "pass a whole checkpoint of the right kind of model",
            )
    if getattr(model, "is_quantized", False):
        # Such weights have no gradient, and few of torch's functions.
        raise UserError(
            f"the checkpoint {source.name_or_path} is quantised",
            "pass the weights of 16 or 32 bits",
        )
    _require_finite(model, source)
    return model.to(device or default_device()).eval()


def _require_finite(model: Any, source: ModelSource) -> None:
    """Refuses weights that are infinite or not a number: everything computed with them would be."""
    faulty = [name for name, weight in model.named_parameters() if not is_finite(_own_part(weight))]
    if faulty:
        raise UserError(
            f"{len(faulty)} weights of {source.name_or_path} are infinite or not a number: "
            f"{some_of(faulty)}",
            "pass a checkpoint whose training did not diverge, or copy it again",
        )


def _own_part(weight: Any) -> torch.Tensor:
    """The weight itself, or this process's share of it under ZeRO-3."""
    share: torch.Tensor | None = getattr(weight, "ds_tensor", None)
    if share is None:
        return weight
    # The last share is padded with whatever was in memory.
    start = share.numel() * torch.distributed.get_rank()
    return share[: max(0, weight.ds_numel - start)]
