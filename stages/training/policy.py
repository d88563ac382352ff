"""Policy and reference for training: device and dtypes, loading, checks, compiled layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.contract.context import ModelSource
from stages.contract.errors import UserError
from stages.modeling.load import load_causal_lm, load_config
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.mapped import load_mapped
from stages.modeling.probe import (
    UnfitModelError,
    check_gradients,
    check_logprobs,
    check_training_mode,
    share_prompts,
)
from stages.modeling.shared_prefix import SHARED_PREFIX, shared_prefix_attention
from stages.training.params import RowLayoutName, TrainingParams

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Numerics:
    """Device and dtypes of policy and reference: the same for both.

    Attributes:
        device: This process's device.
        weights: Of the weights in memory.
        autocast: Whether matrix products are in bfloat16 although the weights are float32.
        bfloat16: Whether the forward pass is in bfloat16 at all.
    """

    device: torch.device
    weights: Dtype
    autocast: bool
    bfloat16: bool

    @classmethod
    def of(cls, params: TrainingParams, *, on_gpu: bool, local_rank: int) -> Numerics:
        """Chooses the numerics for a process."""
        wanted = params.precision
        bfloat16 = on_gpu if wanted == "auto" else wanted == "bfloat16"
        # DeepSpeed keeps its own float32 master weights; frozen weights need none.
        low = bfloat16 and (params.deepspeed.zero_stage != "off" or params.lora.rank > 0)
        # FSDP2 gathers bfloat16 weights for the forward pass; its shards are the master weights.
        casts = params.sharding == "fsdp2" or params.deepspeed.zero_stage != "off"
        return cls(
            device=torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"),
            weights="bfloat16" if low else "float32",
            autocast=bfloat16 and not casts,
            bfloat16=bfloat16,
        )

    def on_host(self) -> Numerics:
        """The same dtypes on the CPU, on which a model is loaded that is then sharded."""
        return replace(self, device=torch.device("cpu"))

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


_OPTIONS: dict[str, str | int | bool | object] = {
    # In this process: none other is to outlive a killed one.
    "compile_threads": 1,
    # Dropout of adapters draws what it draws without compilation.
    "fallback_random": True,
}


def compile_layers(policy: nn.Module, *, stage: str) -> None:
    """Has each decoder layer compiled when it is first run; names of weights stay.

    Lengths are symbols, so that rows of another length need no other code. Attention over packed
    rows stays as it is: its calls depend on the lengths of prompts and responses.

    Args:
        policy: A causal language model of transformers, or a peft model around one.
        stage: Name of the stage, for messages.

    Raises:
        UserError: The model has no layers that could be told apart.
    """
    layers = decoder_layers(policy)
    if not layers:
        raise UserError(
            f"{type(causal_lm(policy)).__name__} has no decoder layers that could be compiled",
            f"set {stage}.compile=false",
        )
    AttentionInterface.register(SHARED_PREFIX, torch.compiler.disable(shared_prefix_attention))
    for layer in layers:
        # In place: a wrapper would have other names, and leave out hooks that come later.
        layer.compile(dynamic=True, options=_OPTIONS)


def decoder_layers(policy: nn.Module) -> list[nn.Module]:
    """Decoder layers of a causal language model of transformers, or of a peft model around one."""
    decoder = causal_lm(policy).get_decoder()
    return [each for each in decoder.modules() if isinstance(each, GradientCheckpointingLayer)]


@contextmanager
def uncompiled(*, compiles: bool) -> Iterator[None]:
    """Runs layers as they are: no code is made for the odd rows of a check.

    Args:
        compiles: Whether the training compiles layers at all.
    """
    if not compiles:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


# Draws experts in training mode, and has no setting that forbids it.
_SAMPLING_ROUTER = "PhimoeTopKRouter"
# Factors that a router draws around 1 in training; elsewhere such a name may be a threshold.
_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def load_logprob_model(
    source: ModelSource, params: TrainingParams, numerics: Numerics
) -> ResponseLogprobs:
    """Loads a causal language model whose forward pass gives log-probabilities.

    For FSDP2, which shards it then, it is on the CPU, its weights in their files where they can be.

    Args:
        source: Folder or hub id, without an adapter.
        params: Those of the stage.
        numerics: Device and dtypes.

    Raises:
        UserError: There is no such model, or what it computes would not be those of its rows.
    """
    if params.sharding != "fsdp2":
        model = load_causal_lm(source, dtype=numerics.weights, device=numerics.device)
    elif params.lora.rank:
        # peft draws adapters in the dtype of the weights.
        model = load_causal_lm(source, dtype=numerics.weights, device=torch.device("cpu"))
    else:
        model = load_mapped(source, dtype=numerics.weights)
    return logprob_model(model, params.row_layout, place=source.name_or_path, stage=params.stage)


def logprob_model(
    model: Any, row_layout: RowLayoutName, *, place: str, stage: str
) -> ResponseLogprobs:
    """Makes a causal language model give log-probabilities, without dropout.

    Args:
        model: A causal language model of transformers.
        row_layout: Of the rows that it is to compute.
        place: Its checkpoint, for messages.
        stage: Name of the stage, for messages.

    Raises:
        UserError: What it computes would not be those of its rows.
    """
    remove_dropout(model)
    check_model(model, row_layout, place=place, stage=stage)
    return ResponseLogprobs(model)


def check_model(model: Any, row_layout: RowLayoutName, *, place: str, stage: str) -> None:
    """Checks that a model without dropout gives the log-probabilities of its rows.

    Packed rows get the attention that they need.

    Args:
        model: A causal language model of transformers.
        row_layout: Of the rows that it is to compute.
        place: Its checkpoint, for messages.
        stage: Name of the stage, for messages.

    Raises:
        UserError: What it computes would not be those of its rows.
    """
    try:
        check_logprobs(model)
        check_training_mode(model)
    except UnfitModelError as error:
        raise UserError(
            f"log-probabilities of {place} cannot be computed: {error}",
            "use a model of the Llama, Mistral or Qwen families",
        ) from error
    if row_layout == "packed":
        try:
            share_prompts(model)
        except UnfitModelError as error:
            raise UserError(
                f"samples cannot be packed into one row for {place}: {error}",
                f"set {stage}.row_layout=padded",
            ) from error


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
    """Has the backward pass compute activations again.

    Raises:
        UserError: The model cannot.
    """
    model = causal_lm(policy)
    remedy = f"set {stage}.gradient_checkpointing=false"
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} has no gradient checkpointing", remedy)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        check_gradients(model)
    except UnfitModelError as error:
        raise UserError(
            f"{type(model).__name__} with gradient checkpointing: {error}", remedy
        ) from error


def checkpoint_dtype(source: ModelSource) -> torch.dtype:
    """Dtype that a checkpoint says its weights have; float32 if it says none."""
    return torch.bfloat16 if load_config(source).dtype == torch.bfloat16 else torch.float32
