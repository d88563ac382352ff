"""The card, the versions, and the two ceilings: matrix products and copies."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from benchmarks.gpu.figures import Figures, milliseconds

_PACKAGES = ("torch", "triton", "transformers", "peft", "deepspeed", "pydantic", "gguf", "numpy")


def measure(figures: Figures, device: torch.device, *, dry: bool) -> None:
    """Writes versions, the rate of products in bfloat16, and the bandwidth of a copy."""
    versions = {name: _version(name) for name in _PACKAGES}
    figures.write("versions", python=platform.python_version(), cuda=torch.version.cuda, **versions)
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        figures.write("card", gpu=card.name, memory_gib=card.total_memory / 2**30)
    size = 64 if dry else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    taken = milliseconds(lambda: left @ right, device, times=10)
    figures.write("product, bfloat16", size=size, ms=taken, tflops=2 * size**3 / taken / 1e9)
    source = torch.randn(2**10 if dry else 2**30, device=device)
    target = torch.empty_like(source)
    taken = milliseconds(lambda: target.copy_(source), device, times=10)
    figures.write("copy", ms=taken, gb_per_second=2 * source.nbytes / taken / 1e6)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
