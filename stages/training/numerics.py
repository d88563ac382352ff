"""Device and dtypes of a training, and what makes it repeatable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from stages.training.params import TrainingParams

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
        """The same dtypes on the CPU, where a model is loaded that is then sharded."""
        return replace(self, device=torch.device("cpu"))

    def forward_context(self) -> torch.autocast:
        """The context in which a model that no trainer wraps gives the trainer's numbers."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)


@contextmanager
def repeatable(*, on_gpu: bool) -> Iterator[None]:
    """Makes the same seed give the same bytes: exactly on the CPU, where kernels allow on a GPU."""
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
