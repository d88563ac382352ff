"""Cost of sampling, of scoring by a reward model, and of log π_ref in an evaluation."""

from __future__ import annotations

import math

from flows.planning.cost import DTYPE_BYTES, GIB, LOAD_BYTES_PER_SECOND, Cost, Device
from flows.planning.sizes import ModelShape
from stages.contract.request import Resources
from stages.generate.params import GenerateParams

# Shares of a device's rates: of matrix products (GPU, CPU), and of its memory's bandwidth.
_EFFICIENCY = {True: 0.5, False: 0.6}
_BANDWIDTH_EFFICIENCY = 0.6
# Prompt tokens that vLLM works on at once; their activations are what the engine keeps free.
_VLLM_PREFILL_TOKENS = 8192
# Keys and values of vLLM on a CPU.
_VLLM_CPU_ROOM = 4 * GIB
# Bytes of a response token in `responses.parquet`: id, log-probability, text.
_RESPONSE_TOKEN_BYTES = 12


def generation_cost(
    model: ModelShape,
    params: GenerateParams,
    resources: Resources,
    device: Device,
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
        prompts: Prompts of the shard.
        prompt_tokens: Mean length of one.
        response_tokens: Mean length of a response.
    """
    size, spread = DTYPE_BYTES[params.dtype], params.devices_per_engine
    vllm, batch = params.backend == "vllm", params.transformers.batch_size
    longest = min(
        params.max_length_tokens or model.max_position_embeddings or math.inf,
        prompt_tokens + params.max_new_tokens,
    )
    working = _forward_bytes(model, size, _VLLM_PREFILL_TOKENS if vllm else batch * prompt_tokens)
    memory = {
        "weights": model.params * size / spread,
        "activations": working / spread,
        "runtime": device.runtime,
    }
    sequence = model.kv_bytes(size) * longest / spread
    room = _vllm_room(params, device, sum(memory.values())) if vllm else batch * sequence
    memory["KV cache"] = max(room, 0.0)
    context = prompt_tokens + response_tokens
    fitting = memory["KV cache"] / (model.kv_bytes(size) * context / spread)
    at_once = max(1.0, min(params.vllm.max_num_seqs, fitting)) if vllm else batch
    # Each engine takes its share of the prompts; processes on a CPU share its rate.
    engines = max(params.num_engines(resources), 1) if resources.gpus else 1
    answered = prompts / engines * params.num_samples
    at_once = min(at_once, max(answered, 1.0))
    rate = device.rate(size) * spread * _EFFICIENCY[device.is_gpu]
    token_flops = 2 * (model.body_params + model.head_params)
    # Each step reads all weights, and the keys and values of all sequences, once.
    read = model.params * size + at_once * context / 2 * model.kv_bytes(size)
    step = max(
        read / (device.bandwidth * spread * _BANDWIDTH_EFFICIENCY),
        at_once * token_flops / rate,
        model.num_hidden_layers * device.layer_seconds,
    )
    # A batch of transformers ends with its longest sequence.
    length = response_tokens if vllm else min(params.max_new_tokens, 2 * response_tokens)
    prefill = prompts * prompt_tokens * 2 * model.body_params
    responses = prompts * params.num_samples
    return Cost(
        tokens=prompts * prompt_tokens + responses * response_tokens,
        flops=prefill + responses * response_tokens * token_flops,
        seconds=_loading(model)
        + prefill / engines / rate
        + math.ceil(answered / at_once) * length * step,
        memory=memory,
        disk=responses * response_tokens * _RESPONSE_TOKEN_BYTES,
        remedy="raise generate.vllm.tensor_parallel_size"
        if vllm
        else "lower generate.transformers.batch_size, or set generate.backend=vllm",
        notes=(_no_room(room, sequence, longest),) if room < sequence else (),
    )


def forward_cost(
    model: ModelShape,
    resources: Resources,
    device: Device,
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
        dtype: Dtype of the weights.
        batch_tokens: Tokens of one pass.
        sequences: Sequences.
        sequence_tokens: Mean length of one.
        response_tokens: Positions of one that the head sees; 0 for a reward model.
        row_bytes: Bytes of a row of the artifact.
        remedy: Settings to change if it does not fit.
    """
    size, copies = DTYPE_BYTES[dtype], resources.gpus or 1
    tokens, head = sequences * sequence_tokens, model.head_params
    flops = tokens * 2 * model.body_params + sequences * response_tokens * 2 * head
    attention = tokens * 2 * model.num_hidden_layers * model.query_width * sequence_tokens
    computing = (flops + attention) / (device.rate(size) * _EFFICIENCY[device.is_gpu])
    passes = math.ceil(tokens / batch_tokens)
    launching = passes * model.num_hidden_layers * device.layer_seconds
    memory = {
        "weights": (model.params if response_tokens else model.params - head) * float(size),
        "activations": _forward_bytes(model, size, batch_tokens),
        "runtime": device.runtime,
    }
    if response_tokens:
        chunks = 2.0 * device.logits_chunk_bytes(model.vocab_size)
        memory["logits"] = min(4.0 * model.vocab_size * batch_tokens, chunks)
    return Cost(
        tokens=tokens,
        flops=flops,
        seconds=_loading(model) + max(computing, launching) / copies,
        memory=memory,
        disk=sequences * row_bytes,
        remedy=remedy,
    )


def _vllm_room(params: GenerateParams, device: Device, taken: float) -> float:
    """Bytes of a device for keys and values."""
    if params.vllm.kv_cache_gib is not None:
        return params.vllm.kv_cache_gib * GIB
    if not device.is_gpu:
        return float(_VLLM_CPU_ROOM)
    return device.memory * params.vllm.gpu_memory_utilization - taken


def _no_room(room: float, sequence: float, tokens: float) -> str:
    return (
        f"{max(room, 0) / GIB:.1f} GiB are left for keys and values, and one sequence of "
        f"{tokens:.0f} tokens takes {sequence / GIB:.1f}: raise "
        "generate.vllm.tensor_parallel_size or gpu_memory_utilization, or lower max_length_tokens"
    )


def _loading(model: ModelShape) -> float:
    return model.params * model.dtype_bytes / LOAD_BYTES_PER_SECOND


def _forward_bytes(model: ModelShape, size: int, tokens: float) -> float:
    """Activations at the widest point of a layer: residual, its norm in float32, gate and up."""
    return tokens * ((size + 4) * model.hidden_size + 3.0 * size * model.intermediate_size)
