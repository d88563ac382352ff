"""Cost of sampling, of scoring by a reward model, and of log π_ref in an evaluation."""

from __future__ import annotations

import math

from flows.pipeline.estimation import Estimation
from flows.planning.cost import (
    GIB,
    LAYER_SECONDS,
    LOAD_BYTES_PER_SECOND,
    RUNTIME_CPU,
    RUNTIME_GPU,
    Cost,
    forward_efficiency,
    logits_chunk_bytes,
)
from flows.planning.hardware import Device
from flows.planning.shape import ModelShape
from stages.contract.request import Resources
from stages.generate.params import GenerateParams

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Prompt tokens that vLLM works on at once; their activations are what the engine keeps free.
_VLLM_PREFILL_TOKENS = 8192
# Bytes of a response token in `responses.parquet`: id, log-probability, text.
RESPONSE_TOKEN_BYTES = 12


def generation_cost(
    model: ModelShape,
    params: GenerateParams,
    resources: Resources,
    device: Device,
    assumed: Estimation,
    *,
    prompts: float,
    prompt_tokens: float,
    response_tokens: float,
) -> Cost:
    """Cost of one shard of `generate`.

    Args:
        model: Shape of the policy.
        params: The stage's parameters.
        resources: Its devices.
        device: What each computes on.
        assumed: Settings of the estimate.
        prompts: Prompts of the shard.
        prompt_tokens: Mean length of one.
        response_tokens: Mean length of a response.
    """
    size = _DTYPE_BYTES[params.dtype]
    vllm = params.backend == "vllm"
    spread = params.devices_per_engine
    context = prompt_tokens + response_tokens
    longest = min(
        params.max_length_tokens or model.context or math.inf,
        prompt_tokens + params.max_new_tokens,
    )
    kv = model.kv_bytes(size) / spread
    weights = model.params * size / spread
    working = _forward_bytes(model, size, _VLLM_PREFILL_TOKENS) / spread
    runtime = RUNTIME_GPU if device.is_gpu else RUNTIME_CPU
    notes: tuple[str, ...] = ()
    if vllm:
        room = _vllm_room(params, device, weights + working + runtime)
        if room < kv * longest:
            notes = (
                f"{max(room, 0) / GIB:.1f} GiB are left for keys and values, and one sequence of "
                f"{longest:.0f} tokens takes {kv * longest / GIB:.1f}: raise "
                "generate.vllm.tensor_parallel_size or gpu_memory_utilization, or lower "
                "max_length_tokens",
            )
        at_once = max(1.0, min(params.vllm.max_num_seqs, max(room, 0.0) / (kv * context)))
        kv_memory = (
            room
            if params.vllm.kv_cache_gib is None and device.is_gpu
            else min(room, at_once * kv * context)
        )
        kv_memory = max(kv_memory, 0.0)
    else:
        at_once = params.transformers.batch_size
        working = _forward_bytes(model, size, at_once * prompt_tokens)
        kv_memory = at_once * kv * longest
    # Each engine takes its share of the prompts; processes on a CPU share its rate.
    prompts_of_one = prompts / max(params.num_engines(resources) if resources.gpus else 1, 1)
    responses = prompts * params.num_samples
    responses_of_one = prompts_of_one * params.num_samples
    at_once = min(at_once, max(responses_of_one, 1.0))
    memory = {
        "weights": weights,
        "KV cache": kv_memory,
        "activations": working,
        "logits": 4.0 * at_once * model.vocabulary * (1 if vllm else 2),
        "runtime": runtime,
    }
    flops = prompts * prompt_tokens * 2 * model.active_params + (
        responses * response_tokens * 2 * (model.active_params + model.head_params)
    )
    rate = device.bfloat16 if size == 2 else device.float32
    rate *= spread * forward_efficiency(assumed, device)
    prefill = prompts_of_one * prompt_tokens * 2 * model.active_params / rate
    # Each step reads all weights, and the keys and values of all sequences, once.
    read = model.params * size + at_once * context / 2 * model.kv_bytes(size)
    step = max(
        read / (device.bandwidth * spread * assumed.bandwidth_efficiency),
        at_once * 2 * (model.active_params + model.head_params) / rate,
        model.layers * LAYER_SECONDS[device.is_gpu],
    )
    # A batch of transformers ends with its longest sequence.
    length = response_tokens if vllm else min(params.max_new_tokens, 2 * response_tokens)
    loading = model.params * model.dtype_bytes / LOAD_BYTES_PER_SECOND
    return Cost(
        tokens=prompts * prompt_tokens + responses * response_tokens,
        flops=flops,
        seconds=loading + prefill + math.ceil(responses_of_one / at_once) * length * step,
        loading_seconds=loading,
        memory=memory,
        disk=responses * response_tokens * RESPONSE_TOKEN_BYTES,
        remedy="raise generate.vllm.tensor_parallel_size"
        if vllm
        else "lower generate.transformers.batch_size, or set generate.backend=vllm",
        notes=notes,
    )


def forward_cost(
    model: ModelShape,
    resources: Resources,
    device: Device,
    assumed: Estimation,
    *,
    dtype: str,
    batch_tokens: int,
    sequences: float,
    sequence_tokens: float,
    response_tokens: float,
    row_bytes: float,
    remedy: str,
) -> Cost:
    """Cost of a forward pass over whole sequences: a reward model, or the reference.

    Args:
        model: Its shape.
        resources: The stage's devices; each holds a copy.
        device: What each computes on.
        assumed: Settings of the estimate.
        dtype: Of the weights.
        batch_tokens: Tokens of one pass.
        sequences: Sequences.
        sequence_tokens: Mean length of one.
        response_tokens: Positions of one that the head sees; 0 for a reward model.
        row_bytes: Bytes of a row of the artifact.
        remedy: Settings to change where it does not fit.
    """
    size = _DTYPE_BYTES[dtype]
    tokens = sequences * sequence_tokens
    head = model.head_params
    flops = tokens * 2 * model.active_params + sequences * response_tokens * 2 * head
    attention = tokens * 2 * model.layers * model.query_width * sequence_tokens
    rate = device.bfloat16 if size == 2 else device.float32
    rate *= forward_efficiency(assumed, device) * (resources.gpus or 1)
    passes = math.ceil(tokens / batch_tokens) if tokens else 0
    launching = passes * model.layers * LAYER_SECONDS[device.is_gpu] / (resources.gpus or 1)
    memory = {
        "weights": (model.params if response_tokens else model.params - head) * float(size),
        "activations": _forward_bytes(model, size, batch_tokens),
        "runtime": RUNTIME_GPU if device.is_gpu else RUNTIME_CPU,
    }
    if response_tokens:
        chunks = 2.0 * logits_chunk_bytes(model.vocabulary, device)
        memory["logits"] = min(4.0 * model.vocabulary * batch_tokens, chunks)
    loading = model.params * model.dtype_bytes / LOAD_BYTES_PER_SECOND
    return Cost(
        tokens=tokens,
        flops=flops,
        seconds=loading + max((flops + attention) / rate, launching),
        memory=memory,
        disk=sequences * row_bytes,
        remedy=remedy,
    )


def _vllm_room(params: GenerateParams, device: Device, taken: float) -> float:
    """Bytes of a device for keys and values."""
    if params.vllm.kv_cache_gib is not None:
        return params.vllm.kv_cache_gib * GIB
    if not device.is_gpu:
        return 4.0 * GIB
    return device.memory * params.vllm.gpu_memory_utilization - taken


def _forward_bytes(model: ModelShape, size: int, tokens: float) -> float:
    """Activations at the widest point of a layer: residual, its norm in float32, gate and up."""
    passed = model.intermediate * max(model.experts_per_token, 1)
    return tokens * ((size + 4) * model.hidden + 3.0 * size * passed)
