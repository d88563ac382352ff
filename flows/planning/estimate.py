"""Estimate of a run: the cost of each of its steps, what the store saves, and what cannot fit."""

from __future__ import annotations

import heapq
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.execution.plan import PlannedStep
from flows.execution.shared_engines import later_with_engine, shares_engines
from flows.pipeline.algorithm import all_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.step import Step
from flows.planning.cost import GIB, Cost
from flows.planning.hardware import GPUS, Device, this_cpu
from flows.planning.step_costs import StepCosts
from stages.contract.request import Resources
from stages.contract.stores import open_store


@dataclass(frozen=True)
class StepEstimate:
    """Cost of one step, whether or not the store has it.

    Attributes:
        step: Name of the step.
        stage: Its stage.
        cached: Whether the store has its artifact.
        processes: Processes that share the work, on all nodes.
        gpus: GPUs, on all nodes.
        device: What each process computes on.
        cost: What it costs.
        warnings: What cannot fit or could not be estimated.
    """

    step: str
    stage: str
    cached: bool
    processes: int
    gpus: int
    device: str
    cost: Cost
    warnings: tuple[str, ...]

    @property
    def gpu_hours(self) -> float:
        """Hours of all its GPUs."""
        return self.gpus * (self.cost.seconds or 0.0) / 3600


@dataclass(frozen=True)
class Estimate:
    """Cost of a run.

    Attributes:
        steps: Its steps, in an order in which they could be computed.
        seconds: Wall time of those that the store lacks, as many at a time as may be.
        price_per_gpu_hour: As configured.
        warnings: Those of the steps that the store lacks, each once, and of the disk.
    """

    steps: tuple[StepEstimate, ...]
    seconds: float
    price_per_gpu_hour: float | None
    warnings: tuple[str, ...]

    def gpu_hours(self, *, cached: bool) -> float:
        """GPU-hours of the steps that the store has, or lacks."""
        return sum(each.gpu_hours for each in self.steps if each.cached == cached)

    def disk(self) -> float:
        """Bytes that the steps still to be computed will keep."""
        return sum(each.cost.disk for each in self.steps if not each.cached)

    def price(self, gpu_hours: float) -> float | None:
        """Money for GPU-hours, where the configuration names a price."""
        return None if self.price_per_gpu_hour is None else self.price_per_gpu_hour * gpu_hours


def estimate(
    config: RunConfig, planned: Sequence[PlannedStep], steps: Sequence[Step] | None = None
) -> Estimate:
    """Estimates a run without starting anything.

    Args:
        config: The run's configuration.
        planned: Its plan, which says what the store has.
        steps: Its steps, where its inputs from outside are not to be looked for.
    """
    costs = StepCosts(config, planned)
    cached = {each.step for each in planned if each.action == "reuse"}
    taken = all_steps(config) if steps is None else steps
    upstream = {each.name: each.upstream() for each in taken}
    before: dict[str, str] = {}
    if shares_engines(config.execution, config.store):
        todo = [each for each in taken if each.name not in cached]
        later = later_with_engine(todo, lambda stage: getattr(config.resources, stage))
        before = {rest[0].name: name for name, rest in later.items() if rest}
    found = [
        _estimate_step(
            config, costs, each, cached=each.name in cached, is_started=each.name in before
        )
        for each in taken
    ]
    for name, previous in before.items():
        upstream[name].append(previous)
    lacking = [each for each in found if not each.cached]
    seconds = end_of(
        [(each.step, each.cost.seconds or 0.0) for each in lacking],
        upstream,
        config.execution.parallel,
    )
    warnings = [warning for each in lacking for warning in each.warnings]
    return Estimate(
        tuple(found),
        seconds,
        config.estimation.price_per_gpu_hour,
        tuple(dict.fromkeys([*warnings, *_disk_warnings(config, lacking)])),
    )


def _estimate_step(
    config: RunConfig, costs: StepCosts, step: Step, *, cached: bool, is_started: bool
) -> StepEstimate:
    resources: Resources = getattr(config.resources, step.stage)
    gpu = GPUS[config.estimation.hardware]
    device = gpu if resources.gpus else this_cpu(resources.cpus)
    cost = costs.of(step, resources, device, is_started=is_started)
    return StepEstimate(
        step=step.name,
        stage=step.stage,
        cached=cached,
        processes=(resources.gpus or resources.processes) * resources.nodes,
        gpus=resources.gpus * resources.nodes,
        device=device.name,
        cost=cost,
        warnings=(*_too_large(step, cost, resources, device), *cost.notes),
    )


def _disk_warnings(config: RunConfig, todo: Sequence[StepEstimate]) -> list[str]:
    if "://" in config.store:
        return []
    store = open_store(config.store)
    needed = sum(each.cost.disk for each in todo)
    needed += max((each.cost.work_disk for each in todo), default=0.0)
    free = shutil.disk_usage(store.root).free
    if needed <= free:
        return []
    return [
        f"the run writes about {needed / GIB:.0f} GiB, and {free / GIB:.0f} GiB are free at "
        f"{store.root}: name another `store`, or make room (`geb gc --delete`)"
    ]


def _too_large(step: Step, cost: Cost, resources: Resources, device: Device) -> list[str]:
    """Warnings where a process does not fit its device, or all do not fit the host."""
    warnings = []
    local = resources.gpus or resources.processes
    needed = cost.peak_memory if device.is_gpu else local * cost.peak_memory
    if needed > device.memory:
        largest = sorted(cost.memory, key=lambda name: -cost.memory[name])[:3]
        terms = ", ".join(f"{name} {cost.memory[name] / GIB:.1f}" for name in largest)
        place = f"a {device.name}" if device.is_gpu else "this machine"
        warnings.append(
            f"{step.stage} does not fit: it takes {needed / GIB:.1f} GiB ({terms}"
            f"{'' if device.is_gpu or local == 1 else f', in each of {local} processes'}), and "
            f"{place} has {device.memory / GIB:.1f}: {cost.remedy}"
        )
    limit = resources.memory_gib
    on_host = local * sum(cost.host_memory.values())
    if limit is not None and on_host > limit * GIB:
        warnings.append(
            f"{step.stage} keeps {on_host / GIB:.1f} GiB in the host's memory, and "
            f"resources.{step.stage}.memory_gib is {limit:g}: raise it, or unset "
            f"{step.stage}.deepspeed.offload_optimizer"
        )
    return warnings


def end_of(
    steps: Sequence[tuple[str, float]], upstream: Mapping[str, Sequence[str]], parallel: int
) -> float:
    """Seconds until the last step ends: each starts once its inputs are there and a slot is free.

    Args:
        steps: Names and seconds of the steps, inputs before those that read them.
        upstream: Names of the steps that each reads from; what is not in ``steps`` is there.
        parallel: Steps that may run at the same time.

    >>> end_of([("a", 2.0), ("b", 1.0), ("c", 1.0)], {"c": ["a"]}, parallel=2)
    3.0
    """
    ends: dict[str, float] = {}
    slots = [0.0] * parallel
    for name, seconds in steps:
        ready = max((ends[each] for each in upstream.get(name, ()) if each in ends), default=0.0)
        start = max(ready, heapq.heappop(slots))
        ends[name] = start + seconds
        heapq.heappush(slots, ends[name])
    return max(ends.values(), default=0.0)
