"""Policy and reference for training: device and dtypes, loading, checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.load import Precision, load_causal_lm
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.probe import (
    UnfitModelError,
    check_logprobs,
    check_training_mode,
    share_prompts,
)
from stages.training.params import TrainingParams


@dataclass(frozen=True)
class Numerics:
    """Device and dtypes of policy and reference: the same for both."""

    device: torch.device
    weights: Precision
    """Type of the weights in memory."""
    autocast: bool
    """True if matrix products are in bfloat16 although the weights are float32."""
    bfloat16: bool
    """True if the forward pass is in bfloat16 at all."""

    @classmethod
    def of(cls, params: TrainingParams, *, on_gpu: bool, local_rank: int) -> Numerics:
        """Chooses the numerics for a process."""
        wanted = params.precision
        bfloat16 = on_gpu if wanted == "auto" else wanted == "bfloat16"
        # DeepSpeed keeps its own float32 master weights; frozen weights need none.
        in_deepspeed = params.deepspeed.zero_stage != "off"
        low = bfloat16 and (in_deepspeed or params.lora.rank > 0)
        return cls(
            device=torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"),
            weights="bfloat16" if low else "float32",
            autocast=bfloat16 and not in_deepspeed,
            bfloat16=bfloat16,
        )

    def forward_context(self) -> torch.autocast:
        """The context in which a model that no trainer wraps gives the trainer's numbers."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)


@contextmanager
def repeatable(*, on_gpu: bool) -> Iterator[None]:
    """Makes the same seed give the same bytes: on a GPU if its kernels can."""
    before = torch.are_deterministic_algorithms_enabled()
    # mypy does not see through the module's class, which makes this an attribute.
    fill_options: Any = torch.utils.deterministic
    fill = fill_options.fill_uninitialized_memory
    # Read by cuBLAS when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    fill_options.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        fill_options.fill_uninitialized_memory = fill


# Draws experts in training mode, and has no setting that forbids it.
_SAMPLING_ROUTER = "PhimoeTopKRouter"
# Factors that a router draws around 1 in training; elsewhere such a name may be a threshold.
_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def load_logprob_model(
    source: ModelSource, params: TrainingParams, numerics: Numerics
) -> ResponseLogprobs:
    """Loads a causal language model whose forward pass gives the log-probabilities of its rows."""
    model = load_causal_lm(source, dtype=numerics.weights, device=numerics.device)
    return logprob_model(model, params, place=source.name_or_path)


def logprob_model(model: Any, params: TrainingParams, *, place: str) -> ResponseLogprobs:
    """Makes a causal language model give log-probabilities, without dropout."""
    remove_dropout(model)
    check_model(model, params, place=place)
    return ResponseLogprobs(model)


def check_model(model: Any, params: TrainingParams, *, place: str) -> None:
    """Checks that a model without dropout gives the log-probabilities of its rows.

    Packed rows get the attention that they need.
    """
    said = f"log-probabilities of {place} cannot be computed"
    remedy = "use a model of the Llama, Mistral or Qwen families"
    try:
        check_logprobs(model)
        check_training_mode(model)
        if params.row_layout == "packed":
            said = f"samples cannot be packed into one row for {place}"
            remedy = f"set {params.stage}.row_layout=padded"
            share_prompts(model)
    except UnfitModelError as error:
        raise UserError(f"{said}: {error}", remedy) from error


def remove_dropout(model: nn.Module) -> None:
    """Sets dropout and router noise to 0: policy and reference differ by their weights only."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # Layers of transformers keep theirs as plain numbers.
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name in _NOISE):
                setattr(module, name, 0.0)
        if type(module).__name__ == _SAMPLING_ROUTER:
            # As an instance's own attribute, so that `train` of the whole model leaves it alone.
            vars(module.eval())["train"] = lambda mode=True, router=module: router


def enable_gradient_checkpointing(policy: nn.Module, *, stage: str) -> None:
    """Has the backward pass compute activations again."""
    model = causal_lm(policy)
    remedy = f"set {stage}.gradient_checkpointing=false"
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} has no gradient checkpointing", remedy)
    model.gradient_checkpointing_enable({"use_reentrant": False})
