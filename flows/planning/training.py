"""Cost of a training: operations, time, disk, and the memory of each process.

Formulas, with their sources, are in docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flows.planning.cost import LOAD_BYTES_PER_SECOND, Cost, Device
from flows.planning.sizes import ModelShape
from stages.contract.request import Resources
from stages.training.params import TrainingParams

_EFFICIENCY = {True: 0.4, False: 0.55}
# DeepSpeed's defaults (runtime/zero/config.py): elements.
_REDUCE_BUCKET = 5e8
_MAX_LIVE_PARAMETERS = 1e9
_SUB_GROUP = 1e9
# stages/modeling/logprobs.py.
_LOGITS_KEPT = 256 * 2**20


@dataclass(frozen=True)
class Samples:
    """Samples that a training reads.

    Attributes:
        number: Samples (pairs, conversations) of an epoch.
        tokens: Tokens of one, its prompt counted once in packed rows.
        response_tokens: Tokens of its responses, which the head sees.
        global_batch: Samples of a step.
        reference_pass: Whether the reference computes them once before.
    """

    number: float
    tokens: float
    response_tokens: float
    global_batch: int
    reference_pass: bool


@dataclass(frozen=True)
class TrainingSetting:
    """Dtypes and processes of a training, as stages/training/numerics.py chooses them.

    Attributes:
        model: Shape of the policy.
        params: The stage's parameters.
        device: What each process computes on.
        world: Processes on all nodes.
    """

    model: ModelShape
    params: TrainingParams
    device: Device
    world: int

    @property
    def fsdp(self) -> bool:
        """FSDP2 in use."""
        return self.params.sharding == "fsdp2"

    @property
    def zero(self) -> int:
        """ZeRO's stage, 0 for none; FSDP2 splits what stage 3 does."""
        if self.fsdp:
            return 3
        stage = self.params.deepspeed.zero_stage
        return 0 if stage == "off" else stage

    @property
    def deepspeed(self) -> bool:
        """DeepSpeed in use: any ZeRO stage."""
        return self.params.deepspeed.zero_stage != "off"

    @property
    def product_bytes(self) -> int:
        """Bytes of a number in matrix products: bfloat16 or float32."""
        wanted = self.params.precision
        low = self.device.is_gpu if wanted == "auto" else wanted == "bfloat16"
        return 2 if low else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in memory."""
        low = self.deepspeed or self.params.lora.rank > 0
        return self.product_bytes if low else 4

    @property
    def trained(self) -> float:
        """Weights that are trained."""
        rank = self.params.lora.rank
        return self.model.lora_params(rank) if rank else self.model.params

    def share(self, from_stage: int) -> float:
        """Share of a process in what ZeRO or FSDP2 splits from ``from_stage`` on."""
        return 1 / self.world if self.zero >= from_stage else 1.0


def training_cost(
    setting: TrainingSetting,
    resources: Resources,
    samples: Samples,
    efficiency: float | None,
    *,
    save_bytes: int,
    copies: int = 1,
) -> Cost:
    """Cost of `train` or `sft`.

    Args:
        setting: Model, parameters and processes.
        resources: The stage's processes.
        samples: What it reads.
        efficiency: Share of the devices' rate; None takes an assumed one.
        save_bytes: Bytes of a saved weight.
        copies: Checkpoints that it saves: two if the references' average is one.
    """
    model, params = setting.model, setting.params
    memory, host = training_memory(setting)
    flops, executed = _operations(setting, samples)
    kept = params.lora.save
    adapters = 0 if kept == "merged" else 4 * setting.trained
    whole = 0 if kept == "adapter" else model.params * save_bytes * copies
    return Cost(
        tokens=samples.number * samples.tokens * (params.epochs + samples.reference_pass),
        flops=flops,
        seconds=_seconds(setting, samples, executed, efficiency),
        memory=memory,
        host_memory=host,
        disk=whole + adapters + 4 * samples.number * samples.response_tokens,
        # One checkpoint is removed when the next is whole.
        work_disk=2 * (model.params * setting.weight_bytes + setting.trained * 12),
        remedy=(
            "set {0}.deepspeed.zero_stage=3, {0}.gradient_checkpointing=true, a lower "
            "{0}.micro_batch_tokens, {0}.deepspeed.offload_optimizer=true, {0}.lora.rank, or a "
            "higher resources.{0}.{1}"
        ).format(params.stage, "gpus" if resources.gpus else "processes"),
    )


def _operations(setting: TrainingSetting, samples: Samples) -> tuple[float, float]:
    """Operations that the model needs, and those that are executed."""
    model, params = setting.model, setting.params
    tokens = samples.number * samples.tokens
    body = tokens * 2 * model.body_params
    forward = body + samples.number * samples.response_tokens * 2 * model.head_params
    # Scores and their mixture, causal: half of 2 · 2 · T per token; as much as a response sees.
    scores = tokens * 2 * model.num_hidden_layers * model.query_width * samples.tokens
    passes = 2 if params.lora.rank else 3
    again = body + scores if params.gradient_checkpointing else 0
    needed = params.epochs * forward * passes
    executed = params.epochs * (forward * passes + scores * 3 + again)
    if samples.reference_pass:
        needed += forward
        executed += forward + scores
    return needed, executed


def _seconds(
    setting: TrainingSetting, samples: Samples, executed: float, efficiency: float | None
) -> float:
    model, params, device = setting.model, setting.params, setting.device
    # Processes on the CPU share the machine.
    rate = device.rate(setting.product_bytes) * (setting.world if device.is_gpu else 1)
    computing = executed / (rate * (efficiency or _EFFICIENCY[device.is_gpu]))
    batch = min(samples.global_batch, samples.number) * samples.tokens
    batches = math.ceil(batch / (params.micro_batch_tokens * setting.world))
    steps = params.epochs * math.ceil(samples.number / samples.global_batch)
    passes = 3 + params.gradient_checkpointing
    launching = steps * batches * model.num_hidden_layers * passes * device.layer_seconds
    loaded = (1 + samples.reference_pass) * model.params * model.dtype_bytes
    return loaded / LOAD_BYTES_PER_SECOND + max(computing, launching)


def training_memory(setting: TrainingSetting) -> tuple[dict[str, float], float]:
    """Memory of a process at the largest moment: the backward pass of a full micro-batch.

    Returns:
        Bytes on its device by term, and bytes that are offloaded to the host's memory.
    """
    model, offload = setting.model, setting.params.deepspeed
    weights = model.params + (setting.trained if setting.params.lora.rank else 0)
    # Moments, and master weights: DeepSpeed makes them of float32 weights, too, under ZeRO.
    has_masters = setting.deepspeed and (setting.weight_bytes == 2 or setting.zero)
    terms = {
        "weights": weights * setting.weight_bytes * setting.share(3),
        "gradients": _gradients(setting),
        "optimizer": (12 if has_masters else 8) * setting.trained * setting.share(1),
        "buffers": _buffers(setting),
        **_activations(setting),
        "runtime": setting.device.runtime,
    }
    host = 0.0
    if offload.offload_optimizer:
        host += terms.pop("optimizer")
    if offload.offload_parameters:
        host += terms.pop("weights")
    return terms, host


def _gradients(setting: TrainingSetting) -> float:
    size = setting.trained * setting.weight_bytes
    if setting.fsdp:
        return 4 * setting.trained * setting.share(2)
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


def _buffers(setting: TrainingSetting) -> float:
    """Weights of other processes that are here for the layers at work, and gradients on their way.

    FSDP2 gathers two layers and the head, and puts the gradients of one of them in the order of the
    shards. ZeRO fills a bucket; stage 3 puts the shards of each process side by side in a copy. A
    CPU's memory that nothing was written to takes no room, and gloo makes copies of its own.
    """
    model, on_gpu = setting.model, setting.device.is_gpu
    if setting.fsdp:
        gathered = setting.product_bytes * (model.head_params + 2.0 * model.layer_params)
        reduced = 0 if setting.params.lora.rank else max(model.head_params, model.layer_params)
        return gathered + 4 * reduced
    if not setting.zero:
        return 0.0
    filled = min(_REDUCE_BUCKET, setting.trained)
    bucket = _REDUCE_BUCKET if on_gpu else filled
    elements = (bucket + filled * (setting.zero == 3)) * (1 if on_gpu else 2)
    if setting.zero == 3 and setting.world > 1:
        elements += min(model.params, _MAX_LIVE_PARAMETERS)
    return elements * setting.weight_bytes


def _activations(setting: TrainingSetting) -> dict[str, float]:
    """Bytes kept for the backward pass of one micro-batch, and the logits of its head."""
    model, params = setting.model, setting.params
    tokens, low = params.micro_batch_tokens, setting.product_bytes
    autocast = low == 2 and not (setting.deepspeed or setting.fsdp)
    wide, layers = model.intermediate_size, model.num_hidden_layers
    # Norms twice in float32 and twice in `low`; queries, keys, values and the attention's output;
    # gate, its activation, up, and their product.
    layer = (8 + 4 * low) * model.hidden_size
    layer += low * (2 * model.query_width + 2 * model.kv_width + 4 * wide)
    kept = layers * layer
    if params.gradient_checkpointing:
        # Each layer's input, and one layer at a time.
        kept = layers * (4 if autocast else low) * model.hidden_size + layer
    # At most all tokens of a micro-batch are of responses.
    logits = 4.0 * model.vocab_size * tokens
    if logits > _LOGITS_KEPT:
        logits = 2.0 * setting.device.logits_chunk_bytes(model.vocab_size)
    # One layer has the gradients of its widest tensors, too.
    terms = {"activations": tokens * (kept + 3.0 * low * wide), "logits": logits}
    if not params.lora.rank:
        terms["head's gradient"] = 4.0 * model.head_params
        if autocast:
            terms["weights in bfloat16"] = 2.0 * model.params
    return terms
