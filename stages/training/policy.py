"""Policy and reference for training: device and dtypes, loading, checks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.contract.errors import UserError
from stages.contract.number_types import NumberType
from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.probe import (
    UnfitModelError,
    check_logprobs,
    check_training_mode,
    share_prompts,
)
from stages.modeling.shared_prefix import SHARED_PREFIX, shared_prefix_attention
from stages.training.params import FEWEST_TOKENS, P, TrainingParams

MOST_TOKENS = 16384
"""Tokens of a micro-batch that keep a GPU busy: more are not faster."""
COMPILED_FROM_TOKENS = 2_000_000
"""Tokens of a training from which compiled layers gain more time than compiling takes."""
_MOST_GRAPHS = 64
"""Graphs of a kind of layer; each mix of gradients, adapters and attention windows has its own."""
_USABLE = 0.9
"""Share of a GPU's memory; the rest is left for fragments."""
_BYTES_TRAINED = 12
"""Bytes of a trained weight besides its own: gradient and two moments."""
_BYTES_KEPT_COMPILED = 40
"""Bytes that a compiled layer keeps for each token and each number of its width. Models of 1B and
8B take 26 to 34 (H200)."""
_BYTES_KEPT_EAGER = 80
"""The same without compilation: counted from the tensors that a Llama layer saves, not measured."""


@dataclass(frozen=True)
class Numerics:
    """Device and dtypes of policy and reference: the same for both."""

    device: torch.device
    weights: NumberType
    """Type of the weights in memory."""
    autocast: bool
    """True if matrix products are in bfloat16 although the weights are float32."""

    @property
    def on_gpu(self) -> bool:
        """True on a GPU, false on the CPU."""
        return self.device.type == "cuda"

    @classmethod
    def of(cls, params: TrainingParams, *, on_gpu: bool, local_rank: int) -> Numerics:
        """Chooses the numerics for a process."""
        bfloat16 = params.precision == "bfloat16"
        return cls(
            device=torch.device("cuda", local_rank) if on_gpu else torch.device("cpu"),
            # Weights that are trained must hold updates far smaller than themselves.
            weights="bfloat16" if bfloat16 and params.lora.rank else "float32",
            autocast=bfloat16,
        )

    def forward_context(self) -> torch.autocast:
        """The context in which a model that no trainer wraps gives the trainer's numbers."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)


def compute_repeatably(*, on_gpu: bool) -> None:
    """Makes the same seed give the same bytes in this process: on a GPU if its kernels can."""
    # Read by cuBLAS when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=on_gpu)
    # mypy does not see through the module's class, which makes this an attribute.
    options: Any = torch.utils.deterministic
    options.fill_uninitialized_memory = False


def load_logprob_model(
    source: ModelSource, params: TrainingParams, numerics: Numerics
) -> ResponseLogprobs:
    """Loads a causal language model whose forward pass gives the log-probabilities of its rows."""
    model = load_causal_lm(source, dtype=numerics.weights, device=numerics.device)
    return logprob_model(model, params, numerics)


def logprob_model(model: Any, params: TrainingParams, numerics: Numerics) -> ResponseLogprobs:
    """Makes a causal language model give log-probabilities, without dropout."""
    remove_dropout(model)
    check_model(model, params, numerics)
    return ResponseLogprobs(model)


def check_model(model: Any, params: TrainingParams, numerics: Numerics) -> None:
    """Checks that a model without dropout gives the log-probabilities of its rows.

    Packed rows get the attention that they need. Weights in shards can be run, and so checked, once
    DeepSpeed's engine has them.
    """
    place = model.name_or_path or "the new model"
    fault = f"log-probabilities of {place} cannot be computed"
    remedy = "use a model of the Llama, Mistral or Qwen families"
    try:
        with numerics.forward_context():
            check_logprobs(model)
            check_training_mode(model)
            if params.row_layout == "packed":
                fault = f"samples cannot be packed into one row for {place}"
                remedy = f"set {params.stage}.row_layout=padded"
                share_prompts(model)
    except UnfitModelError as error:
        raise UserError(f"{fault}: {error}", remedy) from error


def remove_dropout(model: nn.Module) -> None:
    """Sets dropout to 0: policy and reference differ by their weights only."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # Layers of transformers keep theirs as plain numbers.
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def enable_gradient_checkpointing(policy: nn.Module, *, stage: str) -> None:
    """Has the backward pass compute activations again."""
    model = causal_lm(policy)
    remedy = f"set {stage}.gradient_checkpointing=false"
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} has no gradient checkpointing", remedy)
    model.gradient_checkpointing_enable({"use_reentrant": False})


def with_memory_choices(params: P, policy: nn.Module, memory: int | None, *, compiled: bool) -> P:
    """The parameters, with gradient checkpointing and micro-batch tokens that suit the memory.

    ``memory`` are the bytes of the GPU. Where it is None all activations are recomputed. Layers are
    ``compiled``, or eager.
    """
    tokens = params.micro_batch_tokens or MOST_TOKENS
    kept = _BYTES_KEPT_COMPILED if compiled else _BYTES_KEPT_EAGER
    is_short = memory is None or bytes_needed(policy, tokens, kept) > _USABLE * memory
    recompute = params.gradient_checkpointing
    if recompute == "auto":
        recompute = is_short
    if params.micro_batch_tokens is None and (recompute or is_short):
        tokens = FEWEST_TOKENS
    return params.model_copy(
        update={"gradient_checkpointing": recompute, "micro_batch_tokens": tokens}
    )


def bytes_needed(policy: nn.Module, tokens: int, kept: int) -> int:
    """Estimates the memory of a training whose micro-batches of bfloat16 keep all activations.

    ``kept`` are the bytes that a layer keeps for each token and each number of its width.
    """
    config = causal_lm(policy).config.get_text_config()
    activations = kept * tokens * config.num_hidden_layers * config.hidden_size
    weights = sum(weight.numel() * weight.element_size() for weight in policy.parameters())
    trained = sum(weight.numel() for weight in policy.parameters() if weight.requires_grad)
    return int(weights + _BYTES_TRAINED * trained + activations)


def pays_to_compile(params: TrainingParams, tokens: int, *, on_gpu: bool) -> bool:
    """True if layers are compiled in a training of ``tokens`` per process."""
    if params.deepspeed.zero_stage != "off":
        return False
    if params.compile_layers == "auto":
        return on_gpu and tokens >= COMPILED_FROM_TOKENS
    return params.compile_layers


def compile_layers(policy: nn.Module) -> None:
    """Compiles the decoder's layers once for rows of all lengths; attention is not compiled.

    A layer that cannot be compiled raises an error. Computed eagerly, it would round unlike the
    compiled layers of the other model: policy and reference would differ at the first step.
    """
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # DistributedDataParallel would cut other graphs than the reference has.
    torch._dynamo.config.optimize_ddp = False
    # The backward graph is compiled with the forward graph: its errors are found there, too.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    model = causal_lm(policy)
    if not model.get_input_embeddings().weight.requires_grad:
        # Or the first layer, whose input has no gradient, would be compiled apart.
        model.enable_input_require_grads()
    apart = torch.compiler.disable(shared_prefix_attention)
    AttentionInterface.register(SHARED_PREFIX, apart)
    for layer in _decoder_layers(policy):
        layer.compile(dynamic=True)


def leave_layers_eager(policy: nn.Module) -> None:
    """Undoes :func:`compile_layers`."""
    for layer in _decoder_layers(policy):
        layer._compiled_call_impl = None


def _decoder_layers(policy: nn.Module) -> list[nn.Module]:
    modules = causal_lm(policy).get_decoder().modules()
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
