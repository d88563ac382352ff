"""Sampling by the transformers backend in batches, after a check of its log-probabilities."""

from __future__ import annotations

import io
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import Figures, peak_gib, reset_peak, wait
from benchmarks.gpu.step import TINY, fast_folder
from benchmarks.training.shapes import SHAPES, make_model
from stages.contract.events import Emitter
from stages.generate.backend import EncodedPrompt, SampledResponse
from stages.generate.params import GenerateParams
from stages.generate.policy import load_policy
from stages.generate.transformers_backend import TransformersBackend
from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm

_PROMPT_TOKENS = 150
_CHECKED = 8
TOLERANCE = 0.2
"""Largest difference of a log-probability that bfloat16 explains, in nats."""


def measure(figures: Figures, device: torch.device, *, dry: bool) -> None:
    """Writes the largest gap to a forward pass, and tokens a second by the size of batches."""
    shape = TINY if dry else SHAPES["llama-1b"]
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        make_model(shape, Path(folder))
        source = ModelSource(folder)
        for size in (4,) if dry else (256, 1024):
            with figures.guarded(f"batches of {size}"):
                _sample(figures, source, size, 4 if dry else 128, device)


def _sample(
    figures: Figures, source: ModelSource, size: int, new_tokens: int, device: torch.device
) -> None:
    params = GenerateParams(
        backend="transformers",
        num_samples=2,
        max_new_tokens=new_tokens,
        dtype="float32" if device.type == "cpu" else "bfloat16",
        transformers={"batch_size": size},
    )
    # No token ends a response: random weights would end some at once.
    policy = replace(load_policy(source, params), stop_ids=frozenset())
    backend = TransformersBackend(policy, params, Emitter(io.StringIO()))
    prompts = [
        EncodedPrompt([1 + index % 500] * _PROMPT_TOKENS, [2 * index, 2 * index + 1])
        for index in range(size // 2)
    ]
    # Kernels are chosen, and memory is taken, by a first pass.
    samples = list(backend.generate(prompts[:_CHECKED]))
    model = load_causal_lm(source, dtype=params.dtype)
    gap = max(_gap(model, prompts[place], sample) for place, _, sample in samples)
    del model
    figures.write(f"batches of {size}: agreement", agrees=gap <= TOLERANCE, largest_gap=gap)
    reset_peak(device)
    wait(device)
    started = time.perf_counter()
    samples = list(backend.generate(prompts))
    wait(device)
    seconds = time.perf_counter() - started
    tokens = sum(len(sample.token_ids) for _, _, sample in samples)
    figures.write(
        f"batches of {size}",
        tokens_per_second=tokens / seconds,
        new_tokens=new_tokens,
        milliseconds_a_step=1e3 * seconds / new_tokens,
        peak_gib=peak_gib(device),
    )


@torch.inference_mode()
def _gap(model: Any, prompt: EncodedPrompt, sample: SampledResponse) -> float:
    """The largest difference of a sample's log-probabilities from a forward pass's."""
    ids = torch.tensor([[*prompt.token_ids, *sample.token_ids]], device=model.device)
    logp = model(ids).logits[0, len(prompt.token_ids) - 1 : -1].float().log_softmax(-1)
    chosen = logp.gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]
    return (chosen.cpu() - torch.tensor(sample.logprobs)).abs().max().item()
