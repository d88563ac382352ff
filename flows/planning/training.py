"""Cost of a training: operations, time, disk, and the memory of each process.

Formulas, with their sources, are in docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flows.pipeline.estimation import Estimation
from flows.planning.cost import LAYER_SECONDS, LOAD_BYTES_PER_SECOND, Cost
from flows.planning.hardware import Device
from flows.planning.shape import ModelShape
from flows.planning.training_memory import TrainingSetting, training_memory
from stages.contract.request import Resources
from stages.training.params import TrainingParams

_EFFICIENCY = {True: 0.4, False: 0.55}


@dataclass(frozen=True)
class Samples:
    """Samples that a training reads.

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
    setting = TrainingSetting(model, params, device, world)
    memory, host = training_memory(setting)
    flops, executed = _operations(setting, samples)
    tokens = samples.number * samples.tokens * (params.epochs + samples.reference_pass)
    checkpoint = model.params * setting.weight_bytes + setting.trained * 12
    copies = 2 if writes_average else 1
    kept = params.lora.save
    adapters = 0 if kept == "merged" else 4 * setting.trained
    whole = 0 if kept == "adapter" else model.params * save_bytes * copies
    return Cost(
        tokens=tokens,
        flops=flops,
        seconds=_seconds(setting, samples, resources, executed, assumed),
        memory=memory,
        host_memory=host,
        disk=whole + adapters + 4 * samples.number * samples.response_tokens,
        # The one before is removed when the next is whole.
        work_disk=2 * checkpoint,
        remedy=_remedy(setting),
    )


def _operations(setting: TrainingSetting, samples: Samples) -> tuple[float, float]:
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
    setting: TrainingSetting,
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
    return loading + training


def _exchanged(setting: TrainingSetting, batches: int) -> float:
    """Bytes that a process receives in a step (Rajbhandari et al. 2020, §7)."""
    if setting.world == 1:
        return 0.0
    size = setting.trained * setting.weight_bytes
    if setting.fsdp:
        # Weights as the products need them, gradients in float32.
        low = 2 if setting.bfloat16 else 4
        return batches * (2 * setting.model.params * low + 4 * setting.trained)
    if setting.zero < 2:
        return 2 * size
    if setting.zero == 2:
        # Gradients are reduced in every micro-batch, weights gathered once.
        return batches * size + setting.trained * setting.weight_bytes
    return batches * (2 * setting.model.params * setting.weight_bytes + size)


def _link(setting: TrainingSetting, resources: Resources, assumed: Estimation) -> float:
    return assumed.node_bandwidth * 1e9 if resources.nodes > 1 else setting.device.link


def _remedy(setting: TrainingSetting) -> str:
    name, params = setting.params.stage, setting.params
    ways = []
    if setting.world > 1 and setting.zero < 3:
        ways.append(f"{name}.deepspeed.zero_stage=3")
    if not params.gradient_checkpointing:
        ways.append(f"{name}.gradient_checkpointing=true")
    ways.append(f"a lower {name}.micro_batch_tokens")
    if setting.deepspeed and setting.zero and not params.deepspeed.offload_optimizer:
        ways.append(f"{name}.deepspeed.offload_optimizer=true")
    if not params.lora.rank:
        ways.append(f"{name}.lora.rank")
    unit = "gpus" if setting.device.is_gpu else "processes"
    return "set " + ", ".join([*ways, f"or a higher resources.{name}.{unit}"])
