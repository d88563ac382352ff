"""Health of the GPUs that the torch stages see: ``python -m stages.training.gpu_health``.

Prints a JSON list of findings: name, whether it is as the stages need it, detail.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from stages.modeling.shared_prefix import RowLayout, shared_prefix_attention
from stages.training.timing import matmul_flops_per_second

# bfloat16, and flash attention in 16 bits, from Ampere on.
_LEAST_CAPABILITY = (8, 0)
# A prompt with two responses, and one with one.
_LAYOUT = RowLayout(((9, 5, 7), (4, 6)))
_HEADS, _KEY_HEADS, _WIDTH = 4, 2, 64
_WINDOW = 4
# bfloat16 keeps 8 bits.
_ROUNDING = 0.05


class Found(NamedTuple):
    """One finding."""

    name: str
    ok: bool
    detail: str


def look() -> Iterator[Found]:
    """Looks at all GPUs that torch sees; the first finding says whether it sees any."""
    sees = torch.cuda.is_available()
    version = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    yield Found("torch sees a GPU", sees, version if sees else f"{version}: no device")
    if not sees:
        return
    for index in range(torch.cuda.device_count()):
        yield _device(index)
    yield _tried("variable-length attention", _attend)
    yield _tried("matrix products in bfloat16", _multiply)
    yield _tried("nccl", _reduce)


def _device(index: int) -> Found:
    found = torch.cuda.get_device_properties(index)
    capability = (found.major, found.minor)
    detail = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, capability {capability}"
    return Found(f"GPU {index}", capability >= _LEAST_CAPABILITY, detail)


def _tried(name: str, trial: Callable[[], str]) -> Found:
    try:
        return Found(name, True, trial())
    except Exception as error:
        # Whatever is wrong with a kernel is the finding.
        return Found(name, False, f"{type(error).__name__}: {error}".strip().splitlines()[0])


def _attend() -> str:
    """Compares the kernel of packed rows with plain attention in float32."""
    torch.manual_seed(0)
    tokens = sum(sum(group) for group in _LAYOUT.groups)
    query, key, value = (
        torch.randn(1, heads, tokens, _WIDTH, device="cuda")
        for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)
    )
    attend = partial(
        shared_prefix_attention,
        torch.nn.Module(),
        attention_mask=None,
        row_layout=_LAYOUT,
        sliding_window=_WINDOW,
    )
    expected, _ = attend(query=query, key=key, value=value)
    found, _ = attend(query=query.bfloat16(), key=key.bfloat16(), value=value.bfloat16())
    error = (found.float() - expected).abs().max().item()
    if not error < _ROUNDING:
        raise RuntimeError(f"differs from plain attention by {error:.3f}")
    return f"window and grouped heads; differs from plain attention by {error:.4f}"


def _multiply() -> str:
    rate = matmul_flops_per_second(torch.device("cuda"), torch.bfloat16)
    return f"{rate / 1e12:.0f} TFLOP/s"


def _reduce() -> str:
    """Sums a tensor over a group of one process: nccl loads and finds its device."""
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        summed = torch.ones(1, device="cuda")
        torch.distributed.all_reduce(summed)
        torch.cuda.synchronize()
    finally:
        torch.distributed.destroy_process_group()
    return ".".join(map(str, torch.cuda.nccl.version()))


if __name__ == "__main__":
    sys.stdout.write(json.dumps([found._asdict() for found in look()]) + "\n")
