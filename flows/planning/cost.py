"""Peak rates and memories of devices, and the bytes that a training's parameters take.

Rates are dense ones in bfloat16 of the SXM forms, from NVIDIA's data sheets.
"""

import os
from dataclasses import dataclass

from stages.training.params import TrainingParams

GB = 1e9
TFLOPS = 1e12
UTILISATION = 0.25
"""Share of the peak rate that a step is assumed to reach until a rate has been measured."""
MEMORY_SHARE = 0.8
"""Share of a memory that parameters may take; activations, keys and values need the rest."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Two units of 16 float32 lanes, multiply and add, at 3.1 GHz: a core with AVX-512.
_CORE_RATE = 200e9
# Bytes of a parameter's two AdamW moments, and of its float32 copy under DeepSpeed.
_MOMENTS = 8
_MASTER_COPY = 4


@dataclass(frozen=True)
class Device:
    """A GPU as `estimation.hardware` names it, or `cpu`: this machine."""

    name: str
    memory: float
    """Bytes."""
    bfloat16: float
    """Peak operations per second."""


GPUS = {
    device.name: device
    for device in (
        Device("a100-40gb", 40 * GB, 312 * TFLOPS),
        Device("a100-80gb", 80 * GB, 312 * TFLOPS),
        Device("h100", 80 * GB, 989 * TFLOPS),
        Device("h200", 141 * GB, 989 * TFLOPS),
    )
}


def this_cpu(cpus: float | None) -> Device:
    """This machine with `cpus` of its cores, or all."""
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", memory, _CORE_RATE * min(cpus or cores, cores))


def training_bytes(number: int, params: TrainingParams, processes: int) -> float:
    """Bytes of one process for weights, gradients and AdamW, split as ZeRO splits them.

    ``number`` counts the model's parameters. Adapters are small and left out.
    """
    zero = params.deepspeed
    stage = 0 if zero.zero_stage == "off" else zero.zero_stage
    adapters = params.lora.rank > 0
    size = 2 if adapters and params.precision == "bfloat16" and stage < 3 else 4
    weights = size * number / (processes if stage >= 3 else 1)
    gradients = 4 * number / (processes if stage >= 2 else 1)
    # ZeRO-3 shares the weights with its optimizer where both are on one device.
    is_copied = stage in (1, 2) or zero.offload_parameters
    states = _MOMENTS + (_MASTER_COPY if is_copied else 0)
    optimizer = states * number / (processes if stage >= 1 else 1)
    total = 0.0 if zero.offload_parameters else weights
    if not adapters:
        total += gradients
    if not adapters and not zero.offload_optimizer:
        total += optimizer
    return total
