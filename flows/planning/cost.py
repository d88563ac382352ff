"""Cost of one stage call: what it computes, what it holds, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30
RUNTIME_CPU = 0.8 * GIB
"""Python, torch, transformers and DeepSpeed in a process on the CPU, before any weight."""
RUNTIME_GPU = 2.0 * GIB
"""CUDA's context, kernels, nccl's buffers, and what the allocator cannot use."""
START_SECONDS = 8.0
"""Start of a program that loads torch and transformers."""
VLLM_START_SECONDS = 60.0
"""Start of vLLM's engine, graphs captured."""
LOAD_BYTES_PER_SECOND = 1.0e9
"""Weights from disk into a device."""
LAYER_SECONDS = {True: 2.0e-5, False: 6.0e-4}
"""Least time of a forward pass through one layer, of launching its kernels: on a GPU, on a CPU."""


@dataclass(frozen=True)
class Cost:
    """Cost of one stage call.

    Attributes:
        tokens: Tokens that pass the model, each as often as it does.
        flops: Operations that the model needs; recomputation is left out.
        seconds: Wall time; None where nothing tells, as for an oracle of one's own.
        memory: Bytes of one process on its device, by term.
        host_memory: Bytes of one process in the host's memory beside these.
        disk: Bytes of the artifact.
        work_disk: Bytes that it holds besides while it works, such as checkpoints.
        remedy: Settings to change where it does not fit.
        notes: What could not be estimated, and what is wrong already.
    """

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    host_memory: Mapping[str, float] = field(default_factory=dict)
    disk: float = 0.0
    work_disk: float = 0.0
    remedy: str = ""
    notes: tuple[str, ...] = ()

    @property
    def peak_memory(self) -> float:
        """Bytes of one process on its device."""
        return sum(self.memory.values())
