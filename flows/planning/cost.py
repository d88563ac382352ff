"""Devices with their rates, and the cost of one stage call on them; formulas: docs/planning.md.

Rates are dense ones of the SXM forms, from NVIDIA's data sheets:
A100 https://www.nvidia.com/en-us/data-center/a100/, H100 https://www.nvidia.com/en-us/data-center/h100/,
H200 https://www.nvidia.com/en-us/data-center/h200/.
"""

import math
import os
from dataclasses import dataclass

from flows.planning.sizes import DTYPE_BYTES, ModelShape
from stages.contract.request import Resources
from stages.generate.params import GenerateParams
from stages.training.params import TrainingParams

GIB = 2**30
GB = 1e9
TFLOPS = 1e12
_CORE_RATE = 60e9
_CORE_BANDWIDTH = 8 * GB
_LOAD_BYTES_PER_SECOND = 1.0e9
# Least time of a forward pass through one layer, which launches its kernels; on a GPU, and a CPU.
_LAYER_SECONDS = {True: 2.0e-5, False: 6.0e-4}
# Bytes before any weight: Python and torch; on a GPU CUDA's context, kernels and nccl.
_RUNTIME = {True: 2.0 * GIB, False: 0.5 * GIB}
# Shares of a device's rate that a GPU, and a CPU, reaches.
_TRAINING_EFFICIENCY = {True: 0.4, False: 0.55}
_FORWARD_EFFICIENCY = {True: 0.5, False: 0.6}
_BANDWIDTH_EFFICIENCY = 0.6
# DeepSpeed's defaults (runtime/zero/config.py): elements.
_REDUCE_BUCKET = 5e8
_MAX_LIVE_PARAMETERS = 1e9
# Logits that stages/modeling/logprobs.py has in memory at a time.
_LOGITS_BYTES = 256 * 2**20
# Prompt tokens that vLLM works on at once, and its keys and values on a CPU.
_VLLM_PREFILL_TOKENS = 8192
_VLLM_CPU_ROOM = 4 * GIB


@dataclass(frozen=True)
class Device:
    """One device that a process computes on.

    Attributes:
        name: As `estimation.hardware` names it; ``cpu`` for this machine.
        memory: Bytes; of a CPU all of the machine's.
        bfloat16: Operations per second of dense matrix products in bfloat16.
        float32: The same in float32, without TF32.
        bandwidth: Bandwidth of the memory, bytes per second.
    """

    name: str
    memory: float
    bfloat16: float
    float32: float
    bandwidth: float

    @property
    def is_gpu(self) -> bool:
        """A GPU, with memory of its own; not a CPU."""
        return self.name != "cpu"

    def rate(self, dtype_bytes: int) -> float:
        """Operations per second of matrix products of weights of this size."""
        return self.bfloat16 if dtype_bytes == 2 else self.float32


GPUS = {
    each.name: each
    for each in (
        Device("a100-40gb", 40 * GB, 312 * TFLOPS, 19.5 * TFLOPS, 1555 * GB),
        Device("a100-80gb", 80 * GB, 312 * TFLOPS, 19.5 * TFLOPS, 2039 * GB),
        Device("h100", 80 * GB, 989 * TFLOPS, 67 * TFLOPS, 3350 * GB),
        Device("h200", 141 * GB, 989 * TFLOPS, 67 * TFLOPS, 4800 * GB),
    )
}


def this_cpu(cpus: float | None = None) -> Device:
    """This machine, with an assumed rate of each core; ``cpus`` of them, or all."""
    cores = os.cpu_count() or 1
    used = min(cpus or cores, cores)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # No CPU kernel here is faster in bfloat16.
    return Device("cpu", memory, _CORE_RATE * used, _CORE_RATE * used, _CORE_BANDWIDTH * used)


@dataclass(frozen=True)
class Cost:
    """Cost of one stage call.

    Attributes:
        tokens: Tokens that pass the model, each as often as it does.
        flops: Operations that the model needs; recomputation is left out.
        seconds: Wall time; None if nothing tells, as for an oracle of one's own.
        memory: Bytes of one process on its device; 0 of a stage without a model.
        notes: Reasons why something could not be estimated, and faults found already.
    """

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float | None = None
    memory: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """Sequences that pass a model.

    Attributes:
        number: Sequences: pairs or conversations of an epoch, prompts of a shard, responses.
        tokens: Mean tokens of one. A pair's prompt counts once in packed rows; of a shard it is the
            prompt alone.
        response_tokens: Mean tokens of its responses, which the head sees.
    """

    number: float
    tokens: float
    response_tokens: float


def training_cost(
    model: ModelShape,
    params: TrainingParams,
    resources: Resources,
    device: Device,
    work: Work,
    global_batch: int,
    reference_pass: bool,
) -> Cost:
    """Cost of `train` or `sft` on devices of one kind.

    ``work`` are the samples of an epoch, ``global_batch`` those of a step. With ``reference_pass``,
    the reference computes the samples once before.
    """
    world = resources.devices * resources.nodes
    low = _is_low(params, device)
    tokens = work.number * work.tokens
    forward = _forward_flops(model, work)
    scores = _score_flops(model, tokens, work.tokens)
    passes = 2 if params.lora.rank else 3
    again = forward + scores if params.gradient_checkpointing else 0
    executed = params.epochs * (forward * passes + scores * 3 + again)
    executed += reference_pass * (forward + scores)
    # Processes on the CPU share the machine.
    rate = device.rate(2 if low else 4) * (world if device.is_gpu else 1)
    batch = min(global_batch, work.number) * work.tokens
    batches = math.ceil(batch / (params.micro_batch_tokens * world))
    steps = params.epochs * math.ceil(work.number / global_batch)
    launches = steps * batches * model.num_hidden_layers * (3 + params.gradient_checkpointing)
    computing = executed / (rate * _TRAINING_EFFICIENCY[device.is_gpu])
    return Cost(
        tokens=tokens * (params.epochs + reference_pass),
        flops=forward * (params.epochs * passes + reference_pass),
        seconds=(1 + reference_pass) * _loading(model)
        + max(computing, launches * _LAYER_SECONDS[device.is_gpu]),
        memory=training_memory(model, params, device, world),
    )


def _is_low(params: TrainingParams, device: Device) -> bool:
    """True if training multiplies matrices in 16 bits."""
    return device.is_gpu if params.precision == "auto" else params.precision != "float32"


def training_memory(model: ModelShape, params: TrainingParams, device: Device, world: int) -> float:
    """Bytes of a process at the largest moment: the backward pass of a full micro-batch."""
    offload, rank = params.deepspeed, params.lora.rank
    zero = 0 if offload.zero_stage == "off" else offload.zero_stage
    deepspeed = offload.zero_stage != "off"
    low = 2 if _is_low(params, device) else 4
    size = low if deepspeed or rank else 4
    trained = model.lora_params(rank) if rank else model.params

    def share(from_stage: int) -> float:
        return 1 / world if zero >= from_stage else 1.0

    weights = (model.params + (trained if rank else 0)) * size * share(3)
    # DDP's buckets are a second copy; DeepSpeed's step makes float32 of them.
    gradients = trained * size * share(2) * (2 if not zero and world > 1 else 1)
    if deepspeed and size == 2:
        gradients += 4 * min(_MAX_LIVE_PARAMETERS, trained * share(1))
    # AdamW's moments, and DeepSpeed's master weights.
    optimizer = (12 if deepspeed and (size == 2 or zero) else 8) * trained * share(1)
    found = _RUNTIME[device.is_gpu] + gradients
    found += _buffers(model, zero, trained, device, world) * size
    found += 0 if offload.offload_optimizer else optimizer
    found += 0 if offload.offload_parameters else weights
    return found + _activations(model, params, low, autocast=low == 2 and size == 4)


def _buffers(model: ModelShape, zero: int, trained: float, device: Device, world: int) -> float:
    """Elements of gradients on their way, and of others' weights that the layers at work need."""
    if not zero:
        return 0.0
    # Stage 3 keeps a second copy of each bucket, and gloo doubles what it sends.
    copies = (2 if zero == 3 else 1) * (1 if device.is_gpu else 2)
    elements = copies * min(_REDUCE_BUCKET, trained)
    if zero == 3 and world > 1:
        elements += min(model.params, _MAX_LIVE_PARAMETERS)
    return elements


def _activations(model: ModelShape, params: TrainingParams, low: int, *, autocast: bool) -> float:
    """Bytes kept for the backward pass of one micro-batch, with its logits."""
    tokens, layers = params.micro_batch_tokens, model.num_hidden_layers
    wide = model.intermediate_size
    # Norms twice in float32 and twice in `low`; queries, keys, values and the attention's output;
    # gate, its activation, up, and their product.
    layer = (8 + 4 * low) * model.hidden_size
    layer += low * (2 * model.query_width + 2 * model.kv_width + 4 * wide)
    kept = layers * layer
    if params.gradient_checkpointing:
        # Each layer's input, and one layer at a time.
        kept = layers * (4 if autocast else low) * model.hidden_size + layer
    found = tokens * (kept + 3.0 * low * wide) + _logits(model, tokens)
    if not params.lora.rank:
        # The head's gradient, and autocast's copies of the weights.
        found += 4.0 * model.head_params + (2.0 * model.params if autocast else 0)
    return found


def generation_cost(model: ModelShape, params: GenerateParams, device: Device, work: Work) -> Cost:
    """Cost of one shard of `generate`: each prompt of ``work`` gets ``num_samples`` responses."""
    prompts, prompt_tokens, response_tokens = work.number, work.tokens, work.response_tokens
    size = DTYPE_BYTES[params.dtype]
    spread = params.vllm.num_devices if params.backend == "vllm" else 1
    vllm, batch = params.backend == "vllm", params.transformers.batch_size
    longest = min(
        params.max_length_tokens or model.max_position_embeddings or math.inf,
        prompt_tokens + params.max_new_tokens,
    )
    working = _VLLM_PREFILL_TOKENS if vllm else batch * prompt_tokens
    # A mixture samples from the reference beside the policy.
    models = 2 if params.mixture else 1
    taken = models * model.params * size + _forward_bytes(model, size, working)
    taken = taken / spread + _RUNTIME[device.is_gpu]
    sequence = models * model.kv_bytes(size) * longest / spread
    room = _vllm_room(params, device, taken) if vllm else batch * sequence
    context = prompt_tokens + response_tokens
    answered = prompts * params.num_samples
    fitting = room / (model.kv_bytes(size) * context / spread)
    at_once = max(1.0, min(params.vllm.max_num_seqs, fitting)) if vllm else batch
    at_once = min(at_once, max(answered, 1.0))
    rate = device.rate(size) * spread * _FORWARD_EFFICIENCY[device.is_gpu]
    token_flops = 2 * models * (model.body_params + model.head_params)
    # Each step reads all weights, and the keys and values of all sequences, once.
    read = models * (model.params * size + at_once * context / 2 * model.kv_bytes(size))
    step = max(
        read / (device.bandwidth * spread * _BANDWIDTH_EFFICIENCY),
        at_once * token_flops / rate,
        models * model.num_hidden_layers * _LAYER_SECONDS[device.is_gpu],
    )
    # A batch of transformers ends with its longest sequence.
    length = response_tokens if vllm else min(params.max_new_tokens, 2 * response_tokens)
    prefill = models * prompts * prompt_tokens * 2 * model.body_params
    responses = prompts * params.num_samples
    decoding = math.ceil(answered / at_once) * length * step
    no_room = (
        f"{max(room, 0) / GIB:.1f} GiB are left for keys and values, and one sequence of "
        f"{longest:.0f} tokens takes {sequence / GIB:.1f}: raise "
        "generate.vllm.tensor_parallel_size or gpu_memory_utilization, or lower max_length_tokens"
    )
    return Cost(
        tokens=prompts * prompt_tokens + responses * response_tokens,
        flops=prefill + responses * response_tokens * token_flops,
        seconds=_loading(model) + prefill / rate + decoding,
        memory=taken + max(room, 0.0),
        notes=(no_room,) if room < sequence else (),
    )


def forward_cost(
    model: ModelShape,
    resources: Resources,
    device: Device,
    work: Work,
    dtype: str,
    batch_tokens: int,
) -> Cost:
    """Cost of a forward pass over whole sequences: a reward model, or the reference.

    Each of the stage's devices holds a copy. A reward model has no head, hence its ``work`` no
    response tokens.
    """
    size, tokens, has_head = DTYPE_BYTES[dtype], work.number * work.tokens, work.response_tokens > 0
    flops = _forward_flops(model, work)
    executed = flops + _score_flops(model, tokens, work.tokens)
    computing = executed / (device.rate(size) * _FORWARD_EFFICIENCY[device.is_gpu])
    launches = math.ceil(tokens / batch_tokens) * model.num_hidden_layers
    memory = _RUNTIME[device.is_gpu] + _forward_bytes(model, size, batch_tokens)
    memory += (model.params - (0 if has_head else model.head_params)) * size
    return Cost(
        tokens=tokens,
        flops=flops,
        seconds=_loading(model)
        + max(computing, launches * _LAYER_SECONDS[device.is_gpu]) / (resources.gpus or 1),
        memory=memory + (_logits(model, batch_tokens) if has_head else 0.0),
    )


def _forward_flops(model: ModelShape, work: Work) -> float:
    """Operations of a forward pass: 2 for each weight and token, the head for responses alone."""
    body = work.tokens * model.body_params
    return 2 * work.number * (body + work.response_tokens * model.head_params)


def _score_flops(model: ModelShape, tokens: float, length: float) -> float:
    """Operations of the attention's scores and their mixture, causal: half of 2 · 2 · T a token."""
    return tokens * 2 * model.num_hidden_layers * model.query_width * length


def _vllm_room(params: GenerateParams, device: Device, taken: float) -> float:
    """Bytes of a device for keys and values."""
    if params.vllm.kv_cache_gib is not None:
        return params.vllm.kv_cache_gib * GIB
    if not device.is_gpu:
        return float(_VLLM_CPU_ROOM)
    return device.memory * params.vllm.gpu_memory_utilization - taken


def _loading(model: ModelShape) -> float:
    """Seconds from disk into a device, of 16-bit weights."""
    return 2 * model.params / _LOAD_BYTES_PER_SECOND


def _logits(model: ModelShape, tokens: float) -> float:
    """Bytes of float32 logits: all of them, or two chunks of at most 1,024 rows each."""
    whole = 4.0 * model.vocab_size * tokens
    return whole if whole <= _LOGITS_BYTES else max(_LOGITS_BYTES, 8192.0 * model.vocab_size)


def _forward_bytes(model: ModelShape, size: int, tokens: float) -> float:
    """Activations at the widest point of a layer: residual, its norm in float32, gate and up."""
    return tokens * ((size + 4) * model.hidden_size + 3.0 * size * model.intermediate_size)
