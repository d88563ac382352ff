"""Cost of a training: weights, gradients, optimizer, activations and logits of each process.

Formulas, with their sources, are in docs/planning.md.

Shapes: `H` width, `F` width of the feed-forward layers, `V` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flows.pipeline.estimation import Estimation
from flows.planning.cost import (
    LAYER_SECONDS,
    LOAD_BYTES_PER_SECOND,
    RUNTIME_CPU,
    RUNTIME_GPU,
    START_SECONDS,
    Cost,
)
from flows.planning.hardware import Device
from flows.planning.shape import ModelShape
from stages.contract.request import Resources
from stages.training.params import TrainingParams

# DeepSpeed's defaults (runtime/zero/config.py): elements.
_REDUCE_BUCKET = 5e8
_MAX_LIVE_PARAMETERS = 1e9
_SUB_GROUP = 1e9
# stages/modeling/logprobs.py.
_LOGITS_KEPT = 256 * 2**20
_LOGITS_CHUNK = 64 * 2**20
_FEWEST_ROWS = 1024
_EFFICIENCY = {True: 0.4, False: 0.55}
_FORWARD_EFFICIENCY = {True: 0.5, False: 0.6}


@dataclass(frozen=True)
class Samples:
    """What a training reads.

    Attributes:
        number: Samples (pairs, conversations) of an epoch.
        tokens: Tokens of one, its prompt counted once in packed rows.
        response_tokens: Those of its responses, which the head sees.
        global_batch: Samples of a step.
        reference_pass: Whether the reference computes them once before.
    """

    number: float
    tokens: float
    response_tokens: float
    global_batch: int
    reference_pass: bool


@dataclass(frozen=True)
class _Setting:
    """Dtypes and processes of a training, as stages/training/numerics.py chooses them."""

    model: ModelShape
    params: TrainingParams
    device: Device
    world: int

    @property
    def zero(self) -> int:
        stage = self.params.deepspeed.zero_stage
        return 0 if stage == "off" else stage

    @property
    def deepspeed(self) -> bool:
        return self.params.deepspeed.zero_stage != "off"

    @property
    def bfloat16(self) -> bool:
        wanted = self.params.precision
        return self.device.is_gpu if wanted == "auto" else wanted == "bfloat16"

    @property
    def weight_bytes(self) -> int:
        low = self.bfloat16 and (self.deepspeed or self.params.lora.rank > 0)
        return 2 if low else 4

    @property
    def trained(self) -> float:
        rank = self.params.lora.rank
        return self.model.lora_params(rank) if rank else self.model.params

    def share(self, from_stage: int) -> float:
        """Share of a process in what ZeRO splits from ``from_stage`` on."""
        return 1 / self.world if self.zero >= from_stage else 1.0


def training_cost(
    model: ModelShape,
    params: TrainingParams,
    resources: Resources,
    device: Device,
    samples: Samples,
    assumed: Estimation,
    *,
    save_bytes: int,
    writes_average: bool = False,
) -> Cost:
    """Cost of `train` or `sft`.

    Args:
        model: Shape of the policy, and of the reference.
        params: The stage's parameters.
        resources: Its processes.
        device: What each computes on.
        samples: What it reads.
        assumed: Settings of the estimate.
        save_bytes: Bytes of a saved weight.
        writes_average: Whether the average of the references is saved, too.
    """
    world = (resources.gpus or resources.processes) * resources.nodes
    setting = _Setting(model, params, device, world)
    memory, host = _memory(setting)
    flops, executed = _operations(setting, samples)
    tokens = samples.number * samples.tokens * (params.epochs + samples.reference_pass)
    checkpoint = model.params * setting.weight_bytes + setting.trained * 12
    copies = 2 if writes_average else 1
    return Cost(
        tokens=tokens,
        flops=flops,
        seconds=_seconds(setting, samples, resources, executed, assumed),
        memory=memory,
        host_memory=host,
        disk=model.params * save_bytes * copies + 4 * samples.number * samples.response_tokens,
        # The one before is removed when the next is whole.
        work_disk=2 * checkpoint,
        remedy=_remedy(setting),
    )


def _memory(setting: _Setting) -> tuple[dict[str, float], dict[str, float]]:
    """Terms of the largest moment: the backward pass of a full micro-batch."""
    model, params, offload = setting.model, setting.params, setting.params.deepspeed
    weights = model.params * setting.weight_bytes * setting.share(3)
    if params.lora.rank:
        weights += setting.trained * setting.weight_bytes * setting.share(3)
    device: dict[str, float] = {"weights": weights}
    host: dict[str, float] = {}
    optimizer = 8 * setting.trained * setting.share(1)
    # Master weights: always under ZeRO-1 and 2; under ZeRO-3 where the weights are not float32.
    if setting.deepspeed and (setting.weight_bytes == 2 or setting.zero in (1, 2)):
        optimizer += 4 * setting.trained * setting.share(1)
    device["gradients"] = _gradients(setting)
    device["optimizer"] = optimizer
    if offload.offload_optimizer:
        host["optimizer"] = device.pop("optimizer")
    if offload.offload_parameters:
        host["weights"] = device.pop("weights")
    if setting.deepspeed and setting.zero:
        device["reduce bucket"] = _bucket(setting)
    if setting.zero == 3:
        device["gathered weights"] = _gathered(setting)
    device |= _activations(setting)
    device["runtime"] = RUNTIME_GPU if setting.device.is_gpu else RUNTIME_CPU
    return device, host


def _gathered(setting: _Setting) -> float:
    """Weights of other processes' shards that are here for the layers at work."""
    live = min(setting.model.params, _MAX_LIVE_PARAMETERS) * setting.weight_bytes
    return live * (1 - 1 / setting.world)


def _gradients(setting: _Setting) -> float:
    size = setting.trained * setting.weight_bytes
    if not setting.deepspeed:
        # DDP's buckets are a second copy (`gradient_as_bucket_view` is off).
        return size * (2 if setting.world > 1 else 1)
    if setting.zero == 0 and setting.weight_bytes == 2:
        # DeepSpeed's BF16_Optimizer accumulates in float32.
        return setting.trained * (2 + 4)
    grads = size * setting.share(2)
    if setting.weight_bytes == 2:
        # The step turns one sub-group at a time into float32.
        grads += 4 * min(_SUB_GROUP, setting.trained * setting.share(1))
    return grads


def _bucket(setting: _Setting) -> float:
    """DeepSpeed's buffer of gradients on their way; two of them where they overlap (ZeRO-3)."""
    elements = _REDUCE_BUCKET
    if not setting.device.is_gpu:
        # Memory that nothing was written to takes no room.
        elements = min(elements, setting.trained)
    return elements * setting.weight_bytes


def _activations(setting: _Setting) -> dict[str, float]:
    """Bytes kept for the backward pass of one micro-batch, and the logits of its head."""
    model, params = setting.model, setting.params
    tokens = params.micro_batch_tokens
    autocast = setting.bfloat16 and not setting.deepspeed
    residual = 4 if autocast else setting.weight_bytes
    low = 2 if setting.bfloat16 else 4
    # Norms twice in float32 and twice in `low`; queries, keys, values and the attention's output;
    # gate, its activation, up, and their product.
    passed = model.intermediate * max(model.experts_per_token, 1)
    layer = (8 + 4 * low) * model.hidden
    layer += low * (2 * model.query_width + 2 * model.kv_width + 4 * passed)
    if params.gradient_checkpointing:
        # Each layer's input, and one layer at a time with the gradients of its widest tensors.
        kept = tokens * (model.layers * residual * model.hidden + layer + 3 * low * passed)
    else:
        kept = tokens * (model.layers * layer + 3 * low * passed)
    # At most all tokens of a micro-batch are of responses.
    logits = 4.0 * model.vocabulary * tokens
    logits = logits if logits <= _LOGITS_KEPT else 2.0 * _chunk_bytes(setting)
    terms = {"activations": float(kept), "logits": logits}
    if not params.lora.rank:
        terms["head's gradient"] = 4.0 * model.head_params
    if autocast:
        terms["weights in bfloat16"] = 2.0 * (model.params if not params.lora.rank else 0)
    return terms


def _chunk_bytes(setting: _Setting) -> float:
    rows = _FEWEST_ROWS if setting.device.is_gpu else 1
    return max(_LOGITS_CHUNK, rows * 4 * setting.model.vocabulary)


def _operations(setting: _Setting, samples: Samples) -> tuple[float, float]:
    """Operations that the model needs, and those that are executed."""
    model, params = setting.model, setting.params
    tokens = samples.number * samples.tokens
    responses = samples.number * samples.response_tokens
    # Scores and their mixture, causal: half of 2 · 2 · T per token; as much as a response sees.
    attention = 2 * model.layers * model.query_width * samples.tokens
    forward = tokens * 2 * model.active_params + responses * 2 * model.head_params
    backward = 1 if params.lora.rank else 2
    needed = params.epochs * forward * (1 + backward)
    scores = tokens * attention
    executed = params.epochs * (
        forward * (1 + backward)
        + scores * 3
        + (tokens * 2 * model.active_params + scores if params.gradient_checkpointing else 0)
    )
    if samples.reference_pass:
        needed += forward
        executed += forward + scores
    return needed, executed


def _seconds(
    setting: _Setting,
    samples: Samples,
    resources: Resources,
    executed: float,
    assumed: Estimation,
) -> float:
    model, params, device = setting.model, setting.params, setting.device
    efficiency = assumed.training_efficiency or _EFFICIENCY[device.is_gpu]
    # Processes on the CPU share the machine.
    rate = device.bfloat16 if setting.bfloat16 and device.is_gpu else device.float32
    rate *= setting.world if device.is_gpu else 1
    computing = executed / (rate * efficiency)
    batches = math.ceil(
        min(samples.global_batch, samples.number)
        * samples.tokens
        / (params.micro_batch_tokens * setting.world)
    )
    steps = params.epochs * math.ceil(samples.number / samples.global_batch)
    passes = 3 + params.gradient_checkpointing
    launching = steps * batches * model.layers * passes * LAYER_SECONDS[device.is_gpu]
    exchanging = steps * _exchanged(setting, batches) / _link(setting, resources, assumed)
    # Exchange overlaps with the backward pass.
    training = max(computing, launching, exchanging)
    copies = 1 + samples.reference_pass
    loading = copies * model.params * model.dtype_bytes / LOAD_BYTES_PER_SECOND
    return START_SECONDS + loading + training


def _exchanged(setting: _Setting, batches: int) -> float:
    """Bytes that a process receives in a step (Rajbhandari et al. 2020, §7)."""
    if setting.world == 1:
        return 0.0
    size = setting.trained * setting.weight_bytes
    if setting.zero < 2:
        return 2 * size
    if setting.zero == 2:
        # Gradients are reduced in every micro-batch, weights gathered once.
        return batches * size + setting.trained * setting.weight_bytes
    return batches * (2 * setting.model.params * setting.weight_bytes + size)


def _link(setting: _Setting, resources: Resources, assumed: Estimation) -> float:
    return assumed.node_bandwidth * 1e9 if resources.nodes > 1 else setting.device.link


def _remedy(setting: _Setting) -> str:
    name, params = setting.params.stage, setting.params
    ways = []
    if setting.world > 1 and setting.zero < 3:
        ways.append(f"{name}.deepspeed.zero_stage=3")
    if not params.gradient_checkpointing:
        ways.append(f"{name}.gradient_checkpointing=true")
    ways.append(f"a lower {name}.micro_batch_tokens")
    if setting.zero in (1, 2, 3) and not params.deepspeed.offload_optimizer:
        ways.append(f"{name}.deepspeed.offload_optimizer=true")
    if not params.lora.rank:
        ways.append(f"{name}.lora.rank")
    unit = "gpus" if setting.device.is_gpu else "processes"
    return "set " + ", ".join([*ways, f"or a higher resources.{name}.{unit}"])


def forward_efficiency(assumed: Estimation, device: Device) -> float:
    """Share of the device's rate that a forward pass without gradients reaches."""
    return assumed.forward_efficiency or _FORWARD_EFFICIENCY[device.is_gpu]
