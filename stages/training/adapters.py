"""LoRA adapters: refused if they could not be merged, merged by peft's arithmetic, saved."""

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.checkpoint_files import check_finite_files, explained
from stages.modeling.logprobs import causal_lm
from stages.modeling.probe import UnfitModelError, check_training_mode
from stages.training.params import LoraParams

_ADAPTER = "default"


def add_adapters(model: Any, params: LoraParams) -> Any:
    """Wraps a model in LoRA adapters; its own weights are frozen.

    Raises:
        UserError: An adapter of one of its layers could not be merged.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,
        target_modules="all-linear",
        # GPT-2's layers hold their weights the other way round.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
        check_training_mode(causal_lm(adapted))
    except (ValueError, UnfitModelError) as error:
        raise UserError(
            f"lora.rank = {params.rank}: this model cannot have adapters: {error}",
            "set lora.rank to 0, which trains all weights",
        ) from error
    return adapted


def wear_adapters(model: Any, params: LoraParams, folder: Path) -> Any:
    """Wraps a base in LoRA adapters with saved weights (peft's format), to go on training them.

    Its own weights are frozen, and may be sharded.

    Raises:
        UserError: They are of other settings than ``params``, or not finite numbers.
    """
    from peft import PeftConfig, set_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    with explained("the adapter", ModelSource(str(folder))):
        saved: Any = PeftConfig.from_pretrained(str(folder))
        weights = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    if (saved.r, saved.lora_alpha) != (params.rank, params.alpha):
        raise UserError(
            f"the adapter {folder} has rank {saved.r} and alpha {saved.lora_alpha}, and train.lora "
            f"asks for {params.rank} and {params.alpha}",
            "set train.lora to the settings by which the adapter was trained",
        )
    check_finite_files(folder)
    adapted = add_adapters(model, params)
    set_peft_model_state_dict(adapted, weights)
    return adapted


def leave_casts_to_autocast(policy: nn.Module) -> None:
    """Spares adapters a copy of each input in float32, which autocast would cast back."""
    for module in policy.modules():
        # peft's attribute, of which torch's type knows nothing.
        adapter: Any = module
        if hasattr(adapter, "cast_input_dtype_enabled"):
            adapter.cast_input_dtype_enabled = False


def has_adapters(policy: Any) -> bool:
    """True for a model that wears adapters."""
    return causal_lm(policy) is not policy


def merge_adapters(policy: Any, weights: dict[str, Tensor], base: Any) -> dict[str, Tensor]:
    """All weights of a policy under its base's names, adapters merged into ``base``.

    ``weights`` are the adapters, whole; the policy's own may be sharded. The policy's copy of the
    base may be rounded to 16 bits, ``base`` is loaded in float32.
    """
    from peft import get_peft_model

    config = copy.deepcopy(policy.peft_config[_ADAPTER])
    whole = get_peft_model(base, config)
    report = whole.load_state_dict(weights, strict=False)
    assert not report.unexpected_keys, report.unexpected_keys
    merged: dict[str, Tensor] = whole.merge_and_unload().state_dict()
    return merged


def save_adapters(policy: Any, weights: dict[str, Tensor], base: ModelSource, folder: Path) -> None:
    """Writes the adapters alone, as peft's own `save_pretrained` does.

    The same bytes wherever it runs: of the base, only a repository of the hub is named. ``weights``
    are the adapters, whole.
    """
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    adapters = get_peft_model_state_dict(policy, state_dict=weights, save_embedding_layers=False)
    config = copy.deepcopy(policy.peft_config[_ADAPTER])
    config.inference_mode = True
    config.base_model_name_or_path = base.name_or_path if base.revision else None
    config.revision = base.revision
    # peft writes a set in the order of its hashes, which differs by process.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    save_file(
        {name: weight.contiguous() for name, weight in adapters.items()},
        folder / SAFETENSORS_WEIGHTS_NAME,
        metadata={"format": "pt"},
    )
