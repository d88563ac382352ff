"""Decoder layers compiled by torch.compile: one compilation serves all layers and row lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.contract.errors import UserError
from stages.modeling.logprobs import causal_lm
from stages.modeling.shared_prefix import SHARED_PREFIX, shared_prefix_attention

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
