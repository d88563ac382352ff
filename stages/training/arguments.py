"""The Hugging Face Trainer's arguments, made from ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

from transformers import TrainingArguments

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.training.batches import Plan
from stages.training.job import Job, Process
from stages.training.numerics import Numerics
from stages.training.zero import deepspeed_config


def trainer_seed(job: Job[Any]) -> int:
    """Seed of the libraries' random generators; they take 32 bits."""
    return derive_seed(job.seed, "train") % 2**32


def training_arguments(
    job: Job[Any], process: Process, plan: Plan[Any], numerics: Numerics, *, load_universal: bool
) -> TrainingArguments:
    """Makes the arguments, and an empty folder for checkpoints that are not whole yet.

    Under ZeRO-3 they also make every later ``from_pretrained`` shard its weights, for as long as
    they live.

    Args:
        job: The training.
        process: This process.
        plan: Its steps.
        numerics: Its device and precision.
        load_universal: It goes on from a universal checkpoint of DeepSpeed.
    """
    params = job.params
    written = job.work / "writing"
    if process.is_first:
        shutil.rmtree(written, ignore_errors=True)
    # Beside the Trainer's output, which goes when the artifact is there, curves would be lost.
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(job.logs / "tensorboard"))
    return TrainingArguments(
        output_dir=str(written),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=plan.accumulation,
        max_steps=plan.num_steps,
        learning_rate=params.learning_rate,
        lr_scheduler_type=params.lr_schedule
        if params.lr_schedule != "constant"
        else "constant_with_warmup",
        warmup_steps=round(params.warmup_ratio * plan.num_steps),
        optim="adamw_torch_fused",
        weight_decay=params.weight_decay,
        adam_beta1=params.adam_beta1,
        adam_beta2=params.adam_beta2,
        adam_epsilon=params.adam_epsilon,
        max_grad_norm=params.max_grad_norm,
        # FSDP2 casts by itself.
        bf16=numerics.bfloat16 and params.sharding != "fsdp2",
        use_cpu=not job.on_gpu,
        seed=trainer_seed(job),
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        disable_tqdm=True,
        report_to=list(params.report_to) or "none",
        run_name=job.run or None,
        ddp_find_unused_parameters=False,
        deepspeed=deepspeed_config(
            params.deepspeed,
            plan,
            numerics,
            max_grad_norm=params.max_grad_norm,
            load_universal=load_universal,
        ),
    )


def check_trackers(names: Sequence[str]) -> None:
    """Checks that each tracker is one that the Trainer knows and that its package is installed.

    Raises:
        UserError: It is not.
    """
    if not names:
        return
    from transformers.integrations import get_available_reporting_integrations

    available = get_available_reporting_integrations()
    missing = [name for name in names if name not in available]
    if missing:
        raise UserError(
            f"report_to: {', '.join(missing)} cannot be used here; available are "
            f"{', '.join(available) or 'none'}",
            "install the tracker's package in the environment of the stage, or unset report_to",
        )
