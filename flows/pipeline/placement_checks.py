"""Checks of `execution` and `resources` against the stages, the runner and the store."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flows.pipeline.placement import EVAL
from flows.pipeline.tracking import TRACKERS
from stages.contract.stores import cache_home, location_of

if TYPE_CHECKING:
    from flows.pipeline.config import RunConfig

# Stages that train, on as many nodes as they are given.
_TRAINED = ("sft", "train")
_ON_ONE_MACHINE = (
    ". An engine of vLLM is on one machine: spread the model over more of its GPUs "
    "(generate.vllm.tensor_parallel_size), or quantize it (generate.vllm.quantization); raise "
    "generate.num_shards to use more machines"
)


def check_placement(config: RunConfig) -> None:
    """Refuses places and resources with which a stage would not start.

    Raises:
        ValueError: Engines of vLLM that leave devices idle, nodes that nothing starts, a store that
            the nodes or pods do not see, or settings for an unknown stage.
    """
    _check_engine(config)
    _check_nodes(config)
    _check_volumes(config)
    _check_stage_names(config)
    _check_shared_store(config)


def _check_engine(config: RunConfig) -> None:
    """Refuses engines of vLLM that do not come out even on the devices of their stage."""
    if "vllm" not in config.backends():
        return
    engine, resources = config.generate.vllm, config.resources.generate
    pipeline, wanted = engine.pipeline_parallel_size, engine.num_devices
    unit = "gpus" if resources.gpus else "processes"
    has = getattr(resources, unit)
    if has % wanted == 0:
        return
    said = f"generate.vllm.tensor_parallel_size is {engine.tensor_parallel_size}" + (
        f" and pipeline_parallel_size {pipeline}" if pipeline != 1 else ""
    )
    said += f", and resources.generate.gpus is {resources.gpus}" + (
        "" if resources.gpus else f" (processes, which count on a CPU, are {has})"
    )
    if has < wanted:
        raise ValueError(f"{said}: set gpus to {wanted}, or lower tensor_parallel_size")
    raise ValueError(
        f"{said}: {has // wanted} engines leave {has % wanted} of them idle; set {unit} to a "
        f"multiple of {wanted}"
    )


def _check_nodes(config: RunConfig) -> None:
    """Refuses several nodes where nothing would start the others, or they could not meet."""
    for stage in type(config.resources).model_fields:
        nodes = getattr(config.resources, stage).nodes
        if nodes == 1:
            continue
        if stage not in _TRAINED:
            raise ValueError(
                f"resources.{stage}.nodes is {nodes}, and only {' and '.join(_TRAINED)} work on "
                "several nodes: leave it out" + (_ON_ONE_MACHINE if stage == "generate" else "")
            )
        if "://" in config.store:
            raise ValueError(
                f"resources.{stage}.nodes is {nodes}, and the store {config.store} is in a "
                "bucket: the nodes meet in the work folder, so put the store on a file system "
                "that all see"
            )
        runner = config.execution.runner
        by_hand = bool(getattr(config.resources, stage).rendezvous)
        if runner in ("process", "docker", "work_pool") and not by_hand:
            raise ValueError(
                f"resources.{stage}.nodes is {nodes}, and the runner {runner!r} starts one: "
                "set execution.runner to 'slurm' or 'kubernetes', or resources."
                f"{stage}.rendezvous to the first node's host:port and start `python -m "
                "stages.training.node` on the others yourself (docs/training.md)"
            )
        if runner == "docker" and stage not in config.execution.docker.network:
            raise ValueError(
                f"resources.{stage}.nodes is {nodes}, and the container of {stage} has no "
                f"network: set execution.docker.network.{stage} (`host`), or leave nodes out"
            )


def _check_volumes(config: RunConfig) -> None:
    """Refuses a store that pods would not see."""
    if config.execution.runner != "kubernetes":
        return
    place = cache_home() if "://" in config.store else Path(location_of(config.store))
    if config.execution.kubernetes.volume_at(place) is None:
        what = "the cache of the store" if "://" in config.store else "the store"
        raise ValueError(
            f"execution.runner is 'kubernetes', and pods see no volume at {place}, where "
            f"{what} is: name the claim that holds it in execution.kubernetes.volumes "
            f"(`{place}: {{claim: NAME}}`)"
        )


def _check_stage_names(config: RunConfig) -> None:
    """Refuses settings of `execution` for unknown stages."""
    stages = list(type(config.resources).model_fields)
    execution = config.execution
    tables: dict[str, Mapping[str, object]] = {
        "interpreters": execution.interpreters,
        "work_pool.job_variables": execution.work_pool.job_variables,
        "slurm.stages": execution.slurm.stages,
        "kubernetes.stages": execution.kubernetes.stages,
        **{
            f"docker.{name}": getattr(execution.docker, name)
            for name in ("images", "network", "environment", "secrets")
        },
    }
    for name, table in tables.items():
        for stage in table.keys() - stages:
            if name == "interpreters" and stage in (EVAL, TRACKERS):
                continue
            near = difflib.get_close_matches(stage, stages, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"stages are {', '.join(stages)}"
            raise ValueError(f"execution.{name}.{stage}: there is no such stage; {hint}")


def _check_shared_store(config: RunConfig) -> None:
    """Refuses a store that the nodes of a Slurm cluster would not see."""
    if config.execution.runner == "slurm" and "://" in config.store:
        raise ValueError(
            f"execution.runner is 'slurm', and the store {config.store} is in a bucket: put it "
            "on a file system that this machine and the cluster's nodes share"
        )
