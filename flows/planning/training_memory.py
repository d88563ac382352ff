"""Memory of a training: weights, gradients, optimizer, activations and logits of each process.

Formulas, with their sources, are in docs/planning.md.

Shapes: `H` width, `F` width of the feed-forward layers, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from flows.planning.cost import RUNTIME_CPU, RUNTIME_GPU, logits_chunk_bytes
from flows.planning.hardware import Device
from flows.planning.shape import ModelShape
from stages.training.params import TrainingParams

# DeepSpeed's defaults (runtime/zero/config.py): elements.
_REDUCE_BUCKET = 5e8
_MAX_LIVE_PARAMETERS = 1e9
_SUB_GROUP = 1e9
# Freed pieces of weights and gradients that the C library keeps under ZeRO-3, as a multiple of the
# gradients: measured, see docs/planning.md.
_KEPT_BY_ALLOCATOR = 1.5
# stages/modeling/logprobs.py.
_LOGITS_KEPT = 256 * 2**20


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
    def bfloat16(self) -> bool:
        """Matrix products in bfloat16, not in float32."""
        wanted = self.params.precision
        return self.device.is_gpu if wanted == "auto" else wanted == "bfloat16"

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in memory."""
        low = self.bfloat16 and (self.deepspeed or self.params.lora.rank > 0)
        return 2 if low else 4

    @property
    def trained(self) -> float:
        """Weights that are trained."""
        rank = self.params.lora.rank
        return self.model.lora_params(rank) if rank else self.model.params

    def share(self, from_stage: int) -> float:
        """Share of a process in what ZeRO or FSDP2 splits from ``from_stage`` on."""
        return 1 / self.world if self.zero >= from_stage else 1.0


def training_memory(setting: TrainingSetting) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of a process by term, at the largest moment: the backward pass of a full micro-batch.

    Returns:
        Those on its device, and those in the host's memory beside them.
    """
    model, params, offload = setting.model, setting.params, setting.params.deepspeed
    weights = model.params * setting.weight_bytes * setting.share(3)
    if params.lora.rank:
        weights += setting.trained * setting.weight_bytes * setting.share(3)
    device: dict[str, float] = {"weights": weights}
    host: dict[str, float] = {}
    optimizer = 8 * setting.trained * setting.share(1)
    # Master weights, also of float32 weights: DeepSpeed makes them wherever ZeRO is on.
    if setting.deepspeed and (setting.weight_bytes == 2 or setting.zero):
        optimizer += 4 * setting.trained * setting.share(1)
    device["gradients"] = _gradients(setting)
    device["optimizer"] = optimizer
    if offload.offload_optimizer:
        host["optimizer"] = device.pop("optimizer")
    if offload.offload_parameters:
        host["weights"] = device.pop("weights")
    if setting.fsdp:
        device["gathered weights"], device["gradients to reduce"] = _fsdp_buffers(setting)
    if setting.deepspeed and setting.zero:
        device["reduce bucket"] = _bucket(setting)
    if setting.deepspeed and setting.zero == 3:
        device["gathered weights"] = _gathered(setting)
        if not setting.device.is_gpu:
            device["allocator"] = _KEPT_BY_ALLOCATOR * device["gradients"]
    device |= _activations(setting)
    device["runtime"] = RUNTIME_GPU if setting.device.is_gpu else RUNTIME_CPU
    return device, host


def _fsdp_buffers(setting: TrainingSetting) -> tuple[float, float]:
    """Whole weights and gradients of what is at work: a layer, the head, or the embeddings.

    On a CPU a layer's matrices are gathered one by one. One weight for embeddings and head is whole
    from the forward to the end of the backward pass.
    """
    model = setting.model
    size = 2 if setting.bfloat16 else 4
    layer = model.layer_params
    if not setting.device.is_gpu and not setting.params.compile:
        layer = model.hidden * max(model.intermediate, model.query_width)
    ends = model.head_params
    # The next layer is on its way.
    gathered = ends + 2.0 * layer if model.tied else max(2.0 * layer, ends + layer)
    if setting.params.lora.rank:
        # Gradients of adapters are small.
        return size * gathered, 0.0
    # Float32 copies in the order of the shards. Gradients as they were computed are there at the
    # same time, but the head's, which is another term.
    return size * gathered, (ends if model.tied else 0.0) * size + 4.0 * max(ends, layer)


def _gathered(setting: TrainingSetting) -> float:
    """Weights of other processes' shards that are here for the layers at work."""
    if setting.world == 1:
        return 0.0
    # One buffer for the shards of all processes, its own among them.
    return min(setting.model.params, _MAX_LIVE_PARAMETERS) * setting.weight_bytes


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


def _bucket(setting: TrainingSetting) -> float:
    """DeepSpeed's buffer of gradients on their way, and the copies that are made to reduce it."""
    filled = min(_REDUCE_BUCKET, setting.trained)
    # Memory of a CPU that nothing was written to takes no room.
    buffer = _REDUCE_BUCKET if setting.device.is_gpu else filled
    # ZeRO-3 puts the shards of each process side by side; gloo makes a copy of its own.
    copies = (setting.zero == 3) + (not setting.device.is_gpu)
    return (buffer + copies * filled) * setting.weight_bytes


def _activations(setting: TrainingSetting) -> dict[str, float]:
    """Bytes kept for the backward pass of one micro-batch, and the logits of its head."""
    model, params = setting.model, setting.params
    tokens = params.micro_batch_tokens
    autocast = setting.bfloat16 and not (setting.deepspeed or setting.fsdp)
    low = 2 if setting.bfloat16 else 4
    residual = 4 if autocast else low
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
    logits = (
        logits
        if logits <= _LOGITS_KEPT
        else 2.0 * logits_chunk_bytes(model.vocabulary, setting.device)
    )
    terms = {"activations": float(kept), "logits": logits}
    if not params.lora.rank:
        terms["head's gradient"] = 4.0 * model.head_params
    if autocast:
        terms["weights in bfloat16"] = 2.0 * (model.params if not params.lora.rank else 0)
    return terms
