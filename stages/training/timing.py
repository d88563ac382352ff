"""Timing of a training step by its parts; matrix throughput and peak memory of the machine."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn

from stages.modeling.logprobs import causal_lm

Part = Literal["data", "forward", "backward", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
_TRIALS = 4


class StepClock:
    """Sums the seconds that the parts of a step take.

    On a GPU the borders of a part are events of its stream, read when the step is over: nothing
    waits in between, and a kernel counts for the part that launched it.

    Args:
        device: Where training computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[Part] = []
        self._spans: list[tuple[Part, Part | None, Any, Any]] = []

    @contextmanager
    def measure(self, part: Part) -> Iterator[None]:
        """Adds the time of the block to ``part``, less what it measures of other parts."""
        outer = self._open[-1] if self._open else None
        self._open.append(part)
        started = self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._spans.append((part, outer, started, self._mark()))

    def take(self) -> dict[Part, float]:
        """The seconds of each part since the last call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = dict.fromkeys(PARTS, 0.0)
        for part, outer, started, ended in self._spans:
            spent = _seconds(started, ended)
            seconds[part] += spent
            if outer is not None:
                seconds[outer] -= spent
        self._spans.clear()
        return seconds

    def _mark(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(started: Any, ended: Any) -> float:
    if isinstance(started, torch.cuda.Event):
        return started.elapsed_time(ended) / 1000.0
    return ended - started


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Fastest of a few large matrix products: what the share of a step is measured against."""
    size = 8192 if device.type == "cuda" else 1024
    left = torch.ones((size, size), device=device, dtype=dtype)
    clock = StepClock(device)
    seconds = []
    for _ in range(_TRIALS):
        with clock.measure("forward"):
            torch.mm(left, left)
        seconds.append(clock.take()["forward"])
    return 2 * size**3 / min(seconds)


def peak_memory_mib(device: torch.device) -> float:
    """Most memory that this process had so far: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux gives it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def flops_per_token(policy: nn.Module) -> tuple[float, float]:
    """Floating-point operations of training for each token, and for each response token besides.

    Forward pass, gradient of the activations, gradient of the weights that are trained. Attention
    scores and what is computed twice are left out, as is usual when utilisation is stated.

    Args:
        policy: A causal language model, or a peft model around one.
    """
    model = causal_lm(policy)
    head = model.get_output_embeddings().weight
    looked_up = {id(model.get_input_embeddings().weight), id(head)}
    layers = [each for each in model.get_decoder().parameters() if id(each) not in looked_up]
    return sum(map(_flops, layers)), _flops(head)


def _flops(weight: nn.Parameter) -> float:
    # ZeRO-3 leaves an empty tensor where the weight was, with its shape beside it.
    shape = getattr(weight, "ds_shape", weight.shape)
    if len(shape) != 2:
        return 0.0
    return (6.0 if weight.requires_grad else 4.0) * math.prod(shape)
