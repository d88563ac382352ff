"""Hardware tables: memory, matrix-product rate and bandwidth of GPUs, and of this machine's CPU.

Sources: data sheets of NVIDIA, dense rates (without sparsity), SXM form:
A100 https://www.nvidia.com/en-us/data-center/a100/, H100 https://www.nvidia.com/en-us/data-center/h100/,
H200 https://www.nvidia.com/en-us/data-center/h200/.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache

import numpy as np

GB = 1e9
TFLOPS = 1e12
_TRIALS = 5
# A core's share of memory bandwidth on common servers; only decoding on a CPU depends on it.
_CPU_BANDWIDTH = 8 * GB


@dataclass(frozen=True)
class Device:
    """One device that a process computes on.

    Attributes:
        name: As `estimation.hardware` names it; ``cpu`` for this machine.
        memory: Bytes; of a CPU all of the machine's.
        bfloat16: Operations per second of dense matrix products in bfloat16.
        float32: The same in float32, without TF32.
        bandwidth: Of the memory, bytes per second.
        link: To the other devices of its node, bytes per second in one direction.
    """

    name: str
    memory: float
    bfloat16: float
    float32: float
    bandwidth: float
    link: float

    @property
    def is_gpu(self) -> bool:
        """A GPU, with memory of its own; not a CPU."""
        return self.name != "cpu"


GPUS = {
    each.name: each
    for each in (
        Device("a100-40gb", 40 * GB, 312 * TFLOPS, 19.5 * TFLOPS, 1555 * GB, 300 * GB),
        Device("a100-80gb", 80 * GB, 312 * TFLOPS, 19.5 * TFLOPS, 2039 * GB, 300 * GB),
        Device("h100", 80 * GB, 989 * TFLOPS, 67 * TFLOPS, 3350 * GB, 450 * GB),
        Device("h200", 141 * GB, 989 * TFLOPS, 67 * TFLOPS, 4800 * GB, 450 * GB),
    )
}


def this_cpu(cpus: float | None = None) -> Device:
    """This machine, with the rate of a few matrix products in numpy.

    Args:
        cpus: Cores that a stage may use; None for all.
    """
    cores = os.cpu_count() or 1
    used = min(cpus or cores, cores)
    rate = _matmul_rate() * used / _threads(cores)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bandwidth = _CPU_BANDWIDTH * used
    # No CPU kernel here is faster in bfloat16; processes exchange gradients through memory.
    return Device("cpu", memory, rate, rate, bandwidth, bandwidth)


def _threads(cores: int) -> int:
    """Threads that numpy's matrix products use."""
    named = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
    # 0 leaves their number to the library.
    return min(next((int(each) for each in named if each.isdigit()), 0) or cores, cores)


@cache
def _matmul_rate() -> float:
    size = 1024
    left = np.ones((size, size), dtype=np.float32)
    seconds = []
    for _ in range(_TRIALS):
        begun = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)
