"""Log-probabilities of 8,192 tokens by a large head, both passes, compared with the bare products.

Values and gradients are first compared with float64: ‖value − exact‖ / ‖exact‖.

Shapes: `N` tokens, `H` width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.figures import Figures, milliseconds, peak_gib, reset_peak
from stages.modeling import logprobs

TOLERANCES = {"values": 1e-3, "d_hidden": 1e-2, "d_weight": 1e-2}
"""Largest differences from float64 that bfloat16 products and logits explain."""
_SAMPLED = 64


def measure(figures: Figures, device: torch.device, *, dry: bool) -> None:
    """Writes the agreement with float64, then time and memory of each way to compute them."""
    tokens, width, vocabulary = (64, 32, 1000) if dry else (8192, 4096, 151_936)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    weight = 0.04 * torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    gradient = torch.randn(tokens, device=device)
    inputs = hidden.requires_grad_(), weight.requires_grad_(), targets
    exact = _exact(*inputs, gradient)
    with figures.guarded("agreement"):
        _check(figures, "ours", _ours, inputs, gradient, exact)
    with figures.guarded("agreement, chunks"), _in_chunks(device):
        _check(figures, "ours, in chunks", _ours, inputs, gradient, exact)
    with figures.guarded("agreement, without kernels"):
        _check(figures, "without kernels", _without_kernels, inputs, gradient, exact)
    del exact
    flops = 6 * tokens * width * vocabulary
    wide = hidden, weight.detach().float().requires_grad_(), targets
    frozen = hidden, weight.detach(), targets
    ways: dict[str, Callable[[], Any]] = {
        "bare products": lambda: _bare(*inputs),
        "materialised": lambda: _both(_materialised, inputs, gradient),
        "ours": lambda: _both(_ours, inputs, gradient),
        "ours, float32 weight": lambda: _both(_ours, wide, gradient),
        "ours, frozen head": lambda: _both(_ours, frozen, gradient),
        "without kernels": lambda: _both(_without_kernels, inputs, gradient),
    }
    for name, way in ways.items():
        with figures.guarded(name):
            reset_peak(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=name.endswith("weight")):
                taken = milliseconds(way, device, times=2 if dry else 8)
            figures.write(name, ms=taken, peak_gib=peak_gib(device), tflops=flops / taken / 1e9)
    with figures.guarded("ours, in chunks"), _in_chunks(device):
        reset_peak(device)
        taken = milliseconds(lambda: _both(_ours, inputs, gradient), device, times=2 if dry else 8)
        figures.write("ours, in chunks", ms=taken, peak_gib=peak_gib(device))


def _ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return logprobs.token_logprobs(hidden, weight, targets)


def _without_kernels(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    with mock.patch.object(logprobs, "is_fused", lambda *_: False):
        return logprobs.token_logprobs(hidden, weight, targets)


def _materialised(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -functional.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


def _both(way: Callable[..., Tensor], inputs: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor]:
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    return list(torch.autograd.grad(way(*inputs), trained, gradient))


def _bare(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    with torch.no_grad():
        logits = hidden @ weight.T
        logits @ weight
        logits.T @ hidden


def _in_chunks(device: torch.device) -> Any:
    """A block in which no logits are kept."""
    if device.type != "cuda":
        return mock.patch.object(logprobs, "LOGIT_KEEP_BYTES", 0)
    from stages.modeling import fused_logprobs

    return mock.patch.object(fused_logprobs, "KEEP_SHARE", 0.0)


def _sampled(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Some tokens, and some rows of the weight: targets of theirs and others."""
    rows = torch.arange(0, len(hidden), len(hidden) // _SAMPLED, device=hidden.device)
    others = torch.arange(0, len(weight), len(weight) // _SAMPLED, device=hidden.device)
    return rows, torch.cat([targets[rows], others]).unique()


def _exact(hidden: Tensor, weight: Tensor, targets: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Values in float64, and gradients of sampled tokens and of sampled rows of the weight."""
    rows, entries = _sampled(hidden, weight, targets)
    head = weight.detach().double()
    values = []
    d_weight = torch.zeros(len(entries), hidden.shape[1], dtype=torch.float64, device=hidden.device)
    for part in torch.arange(len(hidden), device=hidden.device).split(512):
        inputs = hidden.detach()[part].double()
        logp = (inputs @ head.T).log_softmax(dim=1)
        values.append(logp.gather(1, targets[part, None])[:, 0])
        chosen = targets[part, None] == entries
        d_weight += (gradient[part, None] * (chosen.double() - logp[:, entries].exp())).T @ inputs
    softmax = (hidden.detach()[rows].double() @ head.T).softmax(dim=1)
    d_hidden = gradient[rows, None] * (head[targets[rows]] - softmax @ head)
    return {"values": torch.cat(values), "d_hidden": d_hidden, "d_weight": d_weight}


def _check(
    figures: Figures,
    name: str,
    way: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    exact: dict[str, Tensor],
) -> None:
    rows, entries = _sampled(*inputs)
    d_hidden, d_weight = _both(way, inputs, gradient)
    parts = {
        "values": way(*inputs).detach(),
        "d_hidden": d_hidden[rows],
        "d_weight": d_weight[entries],
    }
    gaps = {
        part: ((value.double() - exact[part]).norm() / exact[part].norm()).item()
        for part, value in parts.items()
    }
    agrees = all(gaps[part] <= limit for part, limit in TOLERANCES.items())
    figures.write(f"agreement with float64, {name}", agrees=agrees, **gaps)
