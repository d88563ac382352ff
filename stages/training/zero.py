"""DeepSpeed's configuration, made from ours: one source for batch sizes, clipping and dtypes."""

from __future__ import annotations

from typing import Any

from stages.training.batches import Plan
from stages.training.numerics import Numerics
from stages.training.params import DeepSpeedParams


def deepspeed_config(
    params: DeepSpeedParams,
    plan: Plan[Any],
    numerics: Numerics,
    *,
    max_grad_norm: float,
    load_universal: bool = False,
) -> dict[str, Any] | None:
    """The configuration, or None where DeepSpeed is off.

    The optimizer and the schedule are the Trainer's, so that they are the same with and without
    DeepSpeed.

    Args:
        params: The stage's settings of DeepSpeed.
        plan: How many micro-batches a step has.
        numerics: Where and in which precision it trains.
        max_grad_norm: Gradients are clipped to this norm.
        load_universal: The checkpoint to go on from is a universal one.
    """
    if params.zero_stage == "off":
        return None
    zero: dict[str, Any] = {"stage": params.zero_stage}
    if params.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": numerics.device.type == "cuda"}
    if params.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": numerics.device.type == "cuda"}
    if params.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return {
        # A micro-batch is one item of the data set, however many pairs are in it.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": zero,
        "checkpoint": {"load_universal": load_universal},
        "bf16": {"enabled": numerics.bfloat16},
        # With an offloaded optimizer DeepSpeed wants its own compiled AdamW; torch's is the one
        # that gives the same result everywhere.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


def reduce_by_gloo() -> None:
    """Keeps DeepSpeed from building a kernel of its own for the collectives of a CPU.

    The lock of torch's builds outlives a killed process, and every later build waits for it.
    """
    import deepspeed
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
