"""The type in which a stage multiplies: bfloat16 where the processor is built for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NumberType = Literal["auto", "float32", "bfloat16", "float16"]
"""Type of weights and activations; `auto` is replaced before a key is computed."""

CPU_INFO = Path("/proc/cpuinfo")
"""Linux's description of the CPU; other systems have none, and count as without bfloat16."""
# Flags of x86 (AVX-512 and AMX), and of ARM.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class Processor:
    """The processor of a stage."""

    gpu: bool
    """False for a CPU."""
    fast_bfloat16: bool
    """False where float32 is faster: 5 to 27 times on a CPU without instructions for bfloat16."""

    @property
    def number_type(self) -> Literal["float32", "bfloat16"]:
        """The type that replaces `auto`."""
        return "bfloat16" if self.fast_bfloat16 else "float32"


def this_processor(*, gpu: bool) -> Processor:
    """The processor of a stage on this machine."""
    words = CPU_INFO.read_text(encoding="utf-8").split() if CPU_INFO.exists() else []
    return Processor(gpu, gpu or not _BFLOAT16_FLAGS.isdisjoint(words))
