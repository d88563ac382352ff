"""Estimate of a run: its steps' tokens, memory and time, by a formula or by measured rates.

The formula (docs/training.md): `N` parameters of a model and `T` tokens that pass it are 6·N·T
operations of a training and 2·N·T of everything else, at an assumed share of the device's peak.
"""

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from flows.execution.plan import PlannedStep
from flows.execution.run_record import RunRecord, runs
from flows.pipeline.algorithm import unread_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.step import Step
from flows.planning.cost import GB, GPUS, MEMORY_SHARE, UTILISATION, Device, this_cpu
from flows.planning.work import StepCost, costs_of_steps
from stages.contract.errors import GebError
from stages.contract.manifest import Manifest
from stages.contract.request import Resources
from stages.store.base import Store
from stages.store.opening import open_store

# Start of a step's program, and of vLLM.
_START_SECONDS = 2.0
_VLLM_START_SECONDS = 60.0
# Runs whose steps are looked at for rates, the last started first.
_MOST_RUNS = 3
# Settings to change if a model does not fit its device.
_REMEDIES = {
    "sft": "set sft.deepspeed.zero_stage=3 or sft.lora.rank, or raise resources.sft.gpus",
    "train": "set train.deepspeed.zero_stage=3, with offload_optimizer=true on few GPUs, or "
    "train.lora.rank, or raise resources.train.gpus",
    "generate": "raise generate.vllm.tensor_parallel_size",
    "score": "set dtype=bfloat16 in the section of the oracle",
    "evaluate": "set evaluate.dtype=bfloat16 or evaluate.log_pi_ref=off",
}


@dataclass(frozen=True)
class StepKind:
    """Steps that one measured rate holds for.

    Attributes:
        params: Parameters of the model.
        engine: Program that computes it, and its type of numbers.
    """

    stage: str
    params: int
    engine: str
    device: Device


Rates = Mapping[StepKind, float]
"""Measured operations by second and device."""


@dataclass(frozen=True)
class RunEstimate:
    """Cost of a run: all steps, the ones that the store lacks, and the wall time of these."""

    steps: Sequence[StepCost]
    lacking: Sequence[StepCost]
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """Warnings of the steps that the store lacks, each once."""
        return list(dict.fromkeys(text for step in self.lacking for text in step.warnings))


def estimate(
    config: RunConfig,
    steps: Sequence[Step],
    planned: Sequence[PlannedStep],
) -> RunEstimate:
    """Estimates a run without starting anything.

    Args:
        config: The run.
        steps: Its steps.
        planned: A line of its plan for each, which says whether the store has it.
    """
    rates = measured_rates(open_store(config.store))
    counted = costs_of_steps(config, steps)
    costs = [_estimate(config, step, counted[step.name], rates) for step in steps]
    lacking = [cost for cost, line in zip(costs, planned, strict=True) if line.action != "reuse"]
    seconds = {cost.step: cost.seconds or 0.0 for cost in lacking}
    upstream = {step.name: step.upstream() for step in steps}
    wall_time = wall_seconds(seconds, upstream, config.execution.parallel)
    return RunEstimate(costs, lacking, wall_time)


def wall_seconds(
    seconds: Mapping[str, float], upstream: Mapping[str, Sequence[str]], parallel: int
) -> float:
    """Wall time of steps: as the longest chain lasts, or all of them ``parallel`` at a time.

    Inputs come before the steps that read them; a step without a time is in the store.
    """
    ends: dict[str, float] = {}
    for name, duration in seconds.items():
        inputs = (ends.get(step, 0.0) for step in upstream[name])
        ends[name] = duration + max(inputs, default=0.0)
    return max([sum(seconds.values()) / parallel, *ends.values()])


def measured_rates(store: Store) -> Rates:
    """Rates of the store's last runs: of each kind of steps the rate of the largest one.

    Start-up weighs least there. Of equal steps the slowest counts, as a resumed one has only the
    seconds of its last attempt.
    """
    largest: dict[StepKind, tuple[float, float]] = {}
    for name in runs(store)[:_MOST_RUNS]:
        record = RunRecord(store, name, refresh=False)
        # A damaged record or artifact is for other commands to report.
        with suppress(GebError):
            config = record.config()
            costs = costs_of_steps(config, unread_steps(config))
            for step in record.steps():
                cost = costs.get(step.step, StepCost())
                # No record tells the devices that have computed an artifact found in the store.
                if not cost.operations or step.state != "done":
                    continue
                resources: Resources = getattr(config.resources, step.stage)
                manifest = store.manifest(step.stage, step.key)
                device = manifest and _device_of(manifest, resources)
                if device and manifest and manifest.seconds:
                    kind = StepKind(step.stage, cost.params, cost.engine, device)
                    size = cost.operations, manifest.seconds * _devices(resources)
                    largest[kind] = max(size, largest.get(kind, size))
    return {kind: operations / seconds for kind, (operations, seconds) in largest.items()}


def _device_of(manifest: Manifest, resources: Resources) -> Device | None:
    """The device that has computed an artifact; None if it is none that estimates know."""
    if not resources.gpus:
        is_here = manifest.accelerator == "cpu" and manifest.host == socket.gethostname()
        return this_cpu(resources.cpus) if is_here else None
    words = set(manifest.accelerator.lower().replace("-", " ").split())
    for gpu in GPUS.values():
        if words.issuperset(gpu.name.split("-")):
            return gpu
    return None


def _estimate(config: RunConfig, step: Step, cost: StepCost, rates: Rates) -> StepCost:
    resources: Resources = getattr(config.resources, step.stage)
    device = GPUS[config.estimation.hardware] if resources.gpus else this_cpu(resources.cpus)
    rate = rates.get(StepKind(step.stage, cost.params, cost.engine, device))
    seconds = None
    if rate is not None:
        seconds = cost.operations / (rate * _devices(resources))
    elif not cost.unknown:
        is_vllm = step.params.image_for(from_hub=False) == "vllm"
        start = _VLLM_START_SECONDS if is_vllm else _START_SECONDS
        assumed = device.bfloat16 * UTILISATION
        seconds = start + cost.operations / (assumed * _devices(resources))
    too_large = _too_large(step.stage, cost, resources, device)
    return replace(
        cost,
        step=step.name,
        stage=step.stage,
        gpu_hours=resources.gpus * resources.nodes * (seconds or 0.0) / 3600,
        seconds=seconds,
        measured=rate is not None,
        warnings=tuple(filter(None, (cost.unknown, too_large))),
    )


def _devices(resources: Resources) -> int:
    """Devices that share the work; processes on a CPU share one."""
    return (resources.gpus or 1) * resources.nodes


def _too_large(stage: str, cost: StepCost, resources: Resources, device: Device) -> str:
    """A warning if a device's memory does not hold the parameters; empty if it does."""
    # Processes on the CPU share the machine's memory.
    memory = cost.memory * (1 if resources.gpus else resources.processes)
    if memory <= MEMORY_SHARE * device.memory:
        return ""
    return (
        f"{stage} does not fit: its parameters take {memory / GB:.1f} GB, and {MEMORY_SHARE:.0%} "
        f"of the {device.name}'s {device.memory / GB:.0f} GB may hold parameters: "
        f"{_REMEDIES[stage]}"
    )
