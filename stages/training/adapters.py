"""LoRA adapters: refused if they could not be merged, and merged by peft's arithmetic."""

from typing import Any

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from stages.contract.errors import UserError
from stages.modeling.logprobs import causal_lm
from stages.modeling.probe import UnfitModelError, check_training_mode
from stages.training.params import LoraParams


def add_adapters(model: Any, params: LoraParams) -> Any:
    """Wraps a model without dropout in LoRA adapters; its own weights are frozen.

    Raises:
        UserError: An adapter of one of its layers could not be merged.
    """
    try:
        adapted = _adapted(model, params)
        check_training_mode(causal_lm(adapted))
    except (ValueError, UnfitModelError) as error:
        raise UserError(
            f"lora.rank = {params.rank}: this model cannot have adapters: {error}",
            "set lora.rank to 0, which trains all weights",
        ) from error
    return adapted


def leave_casts_to_autocast(policy: Any) -> None:
    """Spares adapters a copy of each input in float32, which autocast would cast back."""
    for module in policy.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def merge_adapters(base: Any, params: LoraParams, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All weights of a policy under its base's names, adapters merged into ``base``.

    ``weights`` are the adapters, whole. The policy's own copy of the base may be rounded to 16
    bits, ``base`` is loaded in float32.
    """
    # Unchecked: the base may have dropout, which the policy was trained without.
    adapted = _adapted(base, params)
    report = adapted.load_state_dict(weights, strict=False)
    assert not report.unexpected_keys, report.unexpected_keys
    return adapted.merge_and_unload().state_dict()


def _adapted(model: Any, params: LoraParams) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,
        target_modules="all-linear",
        # GPT-2's layers hold their weights the other way round.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)
