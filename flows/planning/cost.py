"""Cost of one stage call: what it computes, what it holds, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flows.pipeline.estimation import Estimation
from flows.planning.hardware import Device

GIB = 2**30
RUNTIME_CPU = 0.5 * GIB
"""Python, torch, transformers and DeepSpeed in a process on the CPU, before any weight."""
RUNTIME_GPU = 2.0 * GIB
"""CUDA's context, kernels, nccl's buffers, and what the allocator cannot use."""
LOAD_BYTES_PER_SECOND = 1.0e9
"""Weights from disk into a device."""
LAYER_SECONDS = {True: 2.0e-5, False: 6.0e-4}
"""Least time of a forward pass through one layer, of launching its kernels: on a GPU, on a CPU."""
# stages/modeling/logprobs.py.
_LOGITS_CHUNK = 64 * 2**20
_FEWEST_ROWS = 1024
_FORWARD_EFFICIENCY = {True: 0.5, False: 0.6}


@dataclass(frozen=True)
class Cost:
    """Cost of one stage call.

    Attributes:
        tokens: Tokens that pass the model, each as often as it does.
        flops: Operations that the model needs; recomputation is left out.
        seconds: Wall time; None where nothing tells, as for an oracle of one's own.
        loading_seconds: Part of it until an engine has its weights.
        memory: Bytes of one process on its device, by term.
        host_memory: Bytes of one process in the host's memory beside these.
        disk: Bytes of the artifact.
        work_disk: Bytes that it holds besides while it works, such as checkpoints.
        remedy: Settings to change where it does not fit.
        notes: Reasons why something could not be estimated, and faults found already.
    """

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float | None = None
    loading_seconds: float = 0.0
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


def forward_efficiency(assumed: Estimation, device: Device) -> float:
    """Share of the device's rate that a forward pass without gradients reaches."""
    return assumed.forward_efficiency or _FORWARD_EFFICIENCY[device.is_gpu]


def logits_chunk_bytes(vocabulary: int, device: Device) -> int:
    """Bytes of one chunk of float32 logits, of which two are in memory at a time."""
    rows = _FEWEST_ROWS if device.is_gpu else 1
    return max(_LOGITS_CHUNK, rows * 4 * vocabulary)
