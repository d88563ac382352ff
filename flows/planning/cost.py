"""Devices with their rates, and the cost of one stage call on them.

Rates are dense ones of the SXM forms, from NVIDIA's data sheets:
A100 https://www.nvidia.com/en-us/data-center/a100/, H100 https://www.nvidia.com/en-us/data-center/h100/,
H200 https://www.nvidia.com/en-us/data-center/h200/.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

GIB = 2**30
GB = 1e9
TFLOPS = 1e12
LOAD_BYTES_PER_SECOND = 1.0e9
"""Weights from disk into a device."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TRIALS = 5
# A core's share of memory bandwidth on common servers; only decoding on a CPU depends on it.
_CPU_BANDWIDTH = 8 * GB
# stages/modeling/logprobs.py.
_LOGITS_CHUNK = 64 * 2**20
_FEWEST_ROWS = 1024


@dataclass(frozen=True)
class Device:
    """One device that a process computes on.

    Attributes:
        name: As `estimation.hardware` names it; ``cpu`` for this machine.
        memory: Bytes; of a CPU all of the machine's.
        bfloat16: Operations per second of dense matrix products in bfloat16.
        float32: The same in float32, without TF32.
        bandwidth: Of the memory, bytes per second.
    """

    name: str
    memory: float
    bfloat16: float
    float32: float
    bandwidth: float

    @property
    def is_gpu(self) -> bool:
        """A GPU, with memory of its own; not a CPU."""
        return self.name != "cpu"

    @property
    def runtime(self) -> float:
        """Bytes before any weight: Python and torch; on a GPU CUDA's context, kernels and nccl."""
        return (2.0 if self.is_gpu else 0.5) * GIB

    @property
    def layer_seconds(self) -> float:
        """Least time of a forward pass through one layer, which launches its kernels."""
        return 2.0e-5 if self.is_gpu else 6.0e-4

    def rate(self, dtype_bytes: int) -> float:
        """Operations per second of matrix products of weights of this size."""
        return self.bfloat16 if dtype_bytes == 2 else self.float32

    def logits_chunk_bytes(self, vocabulary: int) -> int:
        """Bytes of one chunk of float32 logits, of which two are in memory at a time."""
        return max(_LOGITS_CHUNK, (_FEWEST_ROWS if self.is_gpu else 1) * 4 * vocabulary)


GPUS = {
    each.name: each
    for each in (
        Device("a100-40gb", 40 * GB, 312 * TFLOPS, 19.5 * TFLOPS, 1555 * GB),
        Device("a100-80gb", 80 * GB, 312 * TFLOPS, 19.5 * TFLOPS, 2039 * GB),
        Device("h100", 80 * GB, 989 * TFLOPS, 67 * TFLOPS, 3350 * GB),
        Device("h200", 141 * GB, 989 * TFLOPS, 67 * TFLOPS, 4800 * GB),
    )
}


def this_cpu(cpus: float | None = None) -> Device:
    """This machine, with the rate of a few matrix products in numpy.

    Args:
        cpus: Cores that a stage may use; None for all.
    """
    cores = os.cpu_count() or 1
    used = min(cpus or cores, cores)
    # No CPU kernel here is faster in bfloat16.
    rate = _matmul_rate() * used / _threads(cores)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", memory, rate, rate, _CPU_BANDWIDTH * used)


def _threads(cores: int) -> int:
    """Threads that numpy's matrix products use."""
    named = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
    # 0 leaves their number to the library.
    return min(next((int(each) for each in named if each.isdigit()), 0) or cores, cores)


@cache
def _matmul_rate() -> float:
    """The best of several: other work on the machine makes single ones slower."""
    size = 1024
    left = np.ones((size, size), dtype=np.float32)
    seconds = []
    for _ in range(_TRIALS):
        begun = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)


@dataclass(frozen=True)
class Cost:
    """Cost of one stage call.

    Attributes:
        tokens: Tokens that pass the model, each as often as it does.
        flops: Operations that the model needs; recomputation is left out.
        seconds: Wall time; None if nothing tells, as for an oracle of one's own.
        memory: Bytes of one process on its device, by term.
        host_memory: Bytes that one process offloads to the host's memory.
        disk: Bytes of the artifact.
        work_disk: Bytes that it holds besides while it works, such as checkpoints.
        remedy: Settings to change if it does not fit.
        notes: Reasons why something could not be estimated, and faults found already.
    """

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    host_memory: float = 0.0
    disk: float = 0.0
    work_disk: float = 0.0
    remedy: str = ""
    notes: tuple[str, ...] = ()

    @property
    def peak_memory(self) -> float:
        """Bytes of one process on its device."""
        return sum(self.memory.values())
