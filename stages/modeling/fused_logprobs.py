"""Log-probabilities of response tokens on a GPU: the softmax of the head's logits in two kernels.

One pass over a row of logits gives its normalizer and the target's log-probability; one pass in
place turns the logits into their gradient. Logits have the products' dtype, sums are float32.

Shapes: `N` response tokens, `H` width, `V` vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def fused_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    """Computes log softmax(scale · hidden · weightᵀ)[targets] in float32.

    Args:
        hidden: Last hidden states, [N, H].
        weight: The head's weight, [V, H].
        targets: Token ids, [N].
        scale: Factor on the logits.

    Returns:
        Log-probabilities, [N].
    """
    memory = torch.cuda.get_device_properties(hidden.device).total_memory
    return _FusedLogprobs.apply(hidden, weight, targets, scale, memory)


class _FusedLogprobs(torch.autograd.Function):
    """∂/∂logits = gradient · scale · (onehot(target) − softmax(scale · logits)).

    Where the head is trained, the backward pass needs the logits: they are kept, or computed again
    in chunks. Where it is frozen, the forward pass computes ∂/∂hidden of each log-probability.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, memory: int
    ) -> Tensor:
        needs_hidden, trained = ctx.needs_input_grad[:2]
        dtype = hidden.dtype
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        row_bytes = len(weight) * dtype.itemsize
        keep = trained and len(hidden) * row_bytes <= KEEP_SHARE * memory
        chunk = max(_FEWEST_ROWS, int(CHUNK_SHARE * memory) // row_bytes)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        d_hidden = None
        if needs_hidden and not trained:
            d_hidden = torch.empty_like(hidden)
        kept = []
        with torch.autocast(kind, enabled=False):
            head = weight.to(dtype)
            for rows in _chunks(len(hidden), len(hidden) if keep else chunk):
                logits = hidden[rows].to(dtype) @ head.T
                _to_logprobs(logits, targets[rows], normalizers[rows], logprobs[rows], scale)
                if d_hidden is not None:
                    ones = torch.ones_like(normalizers[rows])
                    _to_gradient(logits, targets[rows], normalizers[rows], ones, scale)
                    d_hidden[rows] = (logits @ head).to(hidden.dtype)
                if keep:
                    kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, normalizers, d_hidden)
        ctx.scale = scale
        ctx.chunk = chunk
        ctx.dtype = dtype
        ctx.kept = kept
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers, d_hidden = ctx.saved_tensors
        if d_hidden is not None:
            scaled = d_hidden.float() * gradient[:, None]
            return scaled.to(hidden.dtype), None, None, None, None
        gradient = gradient.contiguous()
        # Used up here; a second backward pass would compute them again.
        kept = ctx.kept
        ctx.kept = []
        chunks = _chunks(len(hidden), len(hidden) if kept else ctx.chunk)
        # Sums over several chunks are float32, whatever the weight's dtype.
        dtype = weight.dtype if len(chunks) == 1 else torch.float32
        d_hidden = torch.empty_like(hidden)
        d_weight = None
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(ctx.dtype)
            for rows in chunks:
                inputs = hidden[rows].to(ctx.dtype)
                d_logits = kept.pop() if kept else inputs @ head.T
                _to_gradient(d_logits, targets[rows], normalizers[rows], gradient[rows], ctx.scale)
                d_hidden[rows] = (d_logits @ head).to(hidden.dtype)
                part = _product(d_logits.T, inputs, dtype)
                if d_weight is None:
                    d_weight = part
                else:
                    d_weight += part
        assert d_weight is not None
        return d_hidden, d_weight.to(weight.dtype), None, None, None


def _to_logprobs(
    logits: Tensor, targets: Tensor, normalizers: Tensor, logprobs: Tensor, scale: float
) -> None:
    """Fills in the normalizers of logits, [N, V], and the targets' log-probabilities."""
    rows, width = logits.shape
    _normalize[(rows,)](
        logits, targets, normalizers, logprobs, scale, width, BLOCK=_BLOCK, num_warps=_WARPS
    )


def _to_gradient(
    logits: Tensor, targets: Tensor, normalizers: Tensor, gradient: Tensor, scale: float
) -> None:
    """Turns logits, [N, V], into their gradient in place."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, _BLOCK)
    _differentiate[(rows, blocks)](
        logits, targets, normalizers, gradient, scale, width, BLOCK=_BLOCK, num_warps=_WARPS
    )


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product in a dtype, summed in float32 inside."""
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype)


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
