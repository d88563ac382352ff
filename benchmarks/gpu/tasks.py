"""Trainings that the GPU benchmark measures: models, sizes, and ways to compute their steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Variation:
    """One way to compute the same steps."""

    name: str
    tokens: int
    """Most tokens of a micro-batch."""
    recompute: bool = False
    """Activations are computed again in the backward pass."""
    compiled: bool = False
    """Decoder layers are compiled."""
    masters: bool = False
    """Weights are bfloat16, the optimizer's float32."""
    kernels: bool = True
    """The head's softmax is one kernel."""
    casts: bool = False
    """Adapters cast their inputs to float32."""
    zero: str = "off"
    """ZeRO's stage."""
    profiled: bool = False
    """The longest kernels of one more step are listed."""
    precision: Literal["auto", "float32"] = "auto"
    """Type of the forward pass."""
    compiled_reference: bool = False
    """The reference's layers are compiled, too."""
    as_stage: bool = False
    """The stage chooses by itself, as in a long training; the fields above do not count."""


@dataclass(frozen=True)
class Task:
    """A model and how much it is trained on."""

    shape: str
    lora_rank: int
    batch_pairs: int
    steps: int
    variations: Sequence[Variation] = field(default_factory=list)


TASKS = {
    "step-1b": Task(
        "llama-1b",
        lora_rank=0,
        batch_pairs=64,
        steps=4,
        variations=[
            Variation("as before", 8192, recompute=True, kernels=False, profiled=True),
            Variation("layers compiled", 8192, compiled=True, profiled=True),
            Variation("activations kept", 8192),
            Variation("kernels of the head", 8192, recompute=True),
            Variation("layers compiled, 16k", 16384, compiled=True),
            Variation("compiled, bfloat16 weights", 8192, compiled=True, masters=True),
            Variation("compiled, bfloat16 weights, 16k", 16384, compiled=True, masters=True),
            Variation("compiled, recomputed, 16k", 16384, recompute=True, compiled=True),
        ],
    ),
    "step-8b": Task(
        "llama-8b",
        lora_rank=16,
        batch_pairs=32,
        steps=3,
        variations=[
            Variation("as before", 8192, recompute=True, kernels=False, casts=True, profiled=True),
            Variation("layers compiled", 8192, compiled=True, profiled=True),
            Variation("kernels of the head, no casts", 8192, recompute=True),
            Variation("activations kept, 4k", 4096),
            Variation("layers compiled, 12k", 12288, compiled=True),
            Variation("compiled, recomputed", 8192, recompute=True, compiled=True),
        ],
    ),
    "lora-truth": Task(
        "llama-1b",
        lora_rank=16,
        batch_pairs=32,
        steps=4,
        variations=[
            Variation("float32, eager", 8192, recompute=True, precision="float32"),
            Variation("bfloat16, eager", 8192),
            Variation("bfloat16, compiled, eager reference", 8192, compiled=True),
            Variation("bfloat16, compiled", 8192, compiled=True, compiled_reference=True),
        ],
    ),
    "defaults-1b": Task(
        "llama-1b",
        lora_rank=0,
        batch_pairs=64,
        steps=4,
        variations=[Variation("as the stage does", 16384, as_stage=True)],
    ),
    "defaults-8b": Task(
        "llama-8b",
        lora_rank=16,
        batch_pairs=64,
        steps=3,
        variations=[Variation("as the stage does", 16384, as_stage=True)],
    ),
    "zero-1b": Task(
        "llama-1b",
        lora_rank=0,
        batch_pairs=64,
        steps=3,
        variations=[
            Variation("ZeRO-2", 8192, zero="2"),
            Variation("ZeRO-3", 8192, zero="3"),
        ],
    ),
}
