"""Packed rows and the head on a GPU give the CPU's values and gradients in float32."""

import pytest
import torch
from torch import nn

from stages.modeling.logprobs import token_logprobs
from stages.modeling.shared_prefix import RowLayout, shared_prefix_attention

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

LAYOUT = RowLayout(((9, 5, 7), (3, 6), (40, 17, 30, 2)))
TOKENS = sum(sum(group) for group in LAYOUT.groups)
# How far the kernel may be from exact values, in multiples of the CPU's error in 16 bits.
AS_FAR = 2.0


def attended(parts, *, dtype, device, window):
    """Attention and the gradients of its sum of squares, in float32 on the CPU."""
    inputs = [part.detach().to(device, dtype).requires_grad_() for part in parts]
    attended, _ = shared_prefix_attention(
        nn.Module(), *inputs, None, row_layout=LAYOUT, sliding_window=window
    )
    attended.float().square().sum().backward()
    return [tensor.detach().float().cpu() for tensor in (attended, *(part.grad for part in inputs))]


@pytest.mark.parametrize("window", [None, 4, 1000])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (8, 2)], ids=["own keys", "grouped"])
@pytest.mark.parametrize("width", [64, 128])
def test_the_variable_length_kernel_attends_as_plain_attention(window, heads, key_heads, width):
    torch.manual_seed(0)
    parts = [
        torch.randn(1, num_heads, TOKENS, width) for num_heads in (heads, key_heads, key_heads)
    ]
    exact = attended(parts, dtype=torch.float32, device="cpu", window=window)
    on_cpu, on_gpu = (
        [
            (ours - expected).norm() / expected.norm()
            for ours, expected in zip(
                attended(parts, dtype=torch.bfloat16, device=device, window=window),
                exact,
                strict=True,
            )
        ]
        for device in ("cpu", "cuda")
    )
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert 0.0 < gpu <= AS_FAR * cpu


@pytest.mark.parametrize("keep_share", [0.0, 1.0], ids=["in chunks", "kept"])
@pytest.mark.parametrize("rows", [5, 1024, 2500])
def test_the_head_s_kernels_give_the_cpu_s_numbers(rows, keep_share, monkeypatch):
    monkeypatch.setattr("stages.modeling.fused_logprobs.KEEP_SHARE", keep_share)
    monkeypatch.setattr("stages.modeling.fused_logprobs.CHUNK_SHARE", 0.0)
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 64), 0.1 * torch.randn(40_000, 64)
    targets = torch.randint(40_000, (rows,))

    def of(device):
        inputs = [tensor.detach().to(device).requires_grad_() for tensor in (hidden, weight)]
        logprobs = token_logprobs(*inputs, targets.to(device))
        logprobs.sum().backward()
        return [tensor.detach().cpu() for tensor in (logprobs, *(part.grad for part in inputs))]

    for ours, theirs in zip(of("cuda"), of("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
