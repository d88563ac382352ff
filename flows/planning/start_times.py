"""Time that a stage takes to start: programs, libraries, engines, the workers of a training."""

from __future__ import annotations

from flows.pipeline.placement import Execution
from stages.contract.params import StageParams
from stages.contract.request import Resources
from stages.score.params import ScoreParams
from stages.training.params import TrainingParams

_LIGHT_START_SECONDS = 2.0
"""Start of a stage that loads no torch, and its work."""
_START_SECONDS = 8.0
"""Start of a program that loads torch and transformers."""
_FORK_SECONDS = 0.5
"""Start of a stage as a fork of a process that has loaded its libraries."""
_VLLM_START_SECONDS = 60.0
"""Start of vLLM's engine, graphs captured."""
LIGHT_ORACLES = frozenset({"python", "math_verify"})
"""Oracles that load no model and ask no server."""


def start_seconds(params: StageParams, resources: Resources, execution: Execution) -> float:
    """Seconds from the start of a stage's program to its work.

    Args:
        params: The stage's parameters.
        resources: Those of the stage.
        execution: Place and manner in which the run starts its stages.
    """
    if params.image_for(from_hub=False) == "vllm":
        return _VLLM_START_SECONDS
    workers = _START_SECONDS if _starts_workers(params, resources) else 0.0
    if execution.runner == "process" and execution.fork_server and not resources.gpus:
        return _FORK_SECONDS + workers
    light = isinstance(params, ScoreParams) and LIGHT_ORACLES.issuperset(params.parts)
    loads_torch = params.image == "torch" and not light
    return (_START_SECONDS if loads_torch else _LIGHT_START_SECONDS) + workers


def _starts_workers(params: StageParams, resources: Resources) -> bool:
    """True where a training is in processes below the stage's own."""
    return isinstance(params, TrainingParams) and (
        (resources.gpus or resources.processes) * resources.nodes > 1 or params.needs_workers
    )
