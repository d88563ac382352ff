"""Log-probabilities of response tokens on a GPU: the softmax of the head's logits in two kernels.

One pass over a row of logits gives its normalizer and the target's log-probability; one pass in
place turns the logits into their gradient. Logits have the products' dtype, sums are float32.

Shapes: `N` response tokens, `V` vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KEEP_SHARE = 1 / 16
"""Share of the GPU's memory that logits may take from the forward to the backward pass."""
CHUNK_SHARE = 1 / 64
"""Share of the memory for one chunk of logits that are not kept; 1,024 rows at least."""
_FEWEST_ROWS = 1024
_BLOCK = 8192
_WARPS = 16


@triton.jit
def _normalize(logits, targets, normalizers, logprobs, scale, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    largest = -float("inf")
    total = 0.0
    for first in range(0, width, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(start + places, mask=places < width, other=-float("inf"))
        values = values.to(tl.float32) * scale
        above = tl.maximum(largest, tl.max(values))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(values - above))
        largest = above
    normalizer = largest + tl.log(total)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(normalizers + row, normalizer)
    tl.store(logprobs + row, chosen - normalizer)


@triton.jit
def _differentiate(logits, targets, normalizers, gradient, scale, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = logits + row * width
    values = tl.load(start + places, mask=places < width, other=0.0).to(tl.float32)
    softmax = tl.exp(values * scale - tl.load(normalizers + row))
    chosen = tl.where(places == tl.load(targets + row), 1.0, 0.0)
    values = tl.load(gradient + row) * scale * (chosen - softmax)
    tl.store(start + places, values.to(logits.dtype.element_ty), mask=places < width)


@dataclass(frozen=True)
class FusedSoftmax:
    """Softmax of a chunk of scaled logits, [N, V], by two kernels."""

    scale: float

    def logprobs(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        """Log-probabilities of the targets, and what :meth:`gradient` needs."""
        rows, width = logits.shape
        values = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        normalizers, logprobs = values
        _normalize[(rows,)](
            logits,
            targets,
            normalizers,
            logprobs,
            self.scale,
            width,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
        return logprobs, (logits, normalizers)

    def gradient(self, state: Any, targets: Tensor, gradient: Tensor) -> Tensor:
        """∂/∂logits = gradient · scale · (onehot(target) − softmax(scale · logits)), in place."""
        logits, normalizers = state
        rows, width = logits.shape
        blocks = triton.cdiv(width, _BLOCK)
        _differentiate[(rows, blocks)](
            logits,
            targets,
            normalizers,
            gradient,
            self.scale,
            width,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
        return logits


def keeps(size: int, device: torch.device) -> bool:
    """True if logits of this many bytes are kept for the backward pass."""
    return size <= KEEP_SHARE * _memory(device)


def chunk_rows(row_bytes: int, device: torch.device) -> int:
    """Rows of a chunk of logits that are not kept."""
    return max(_FEWEST_ROWS, int(CHUNK_SHARE * _memory(device)) // row_bytes)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
