"""A training: its start by the stage, what all of its processes share, and one of these processes.

A training in one process runs in the stage's own. Otherwise `stages/training/node.py` starts a
worker process for each device. A training that lacks memory starts again with half the tokens.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, SerializeAsAny

from stages.contract.adapters import adapter_input
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Emitter
from stages.contract.request import Resources
from stages.harness.context import ModelSource, StageContext
from stages.harness.program import deferred_stop
from stages.training.params import TrainingParams

P = TypeVar("P", bound=TrainingParams)
StopRequested = Callable[[], bool]


class Job(BaseModel, Generic[P]):
    """One training, as every process of it needs to know it.

    Attributes:
        stage: The stage's name.
        params: Its parameters.
        seed: Seed of the stage call.
        models: Models of the request by input name; equal if they have the same weights.
        files: Files of the request by input name.
        out: Folder of the artifact being written.
        work: Folder that survives failed attempts.
        resources: Nodes of the training, and GPUs or processes of each.
    """

    model_config = ConfigDict(frozen=True)

    stage: str
    params: SerializeAsAny[P]
    seed: int
    models: dict[str, ModelSource]
    files: dict[str, tuple[Path, ...]]
    out: Path
    work: Path
    resources: Resources

    @property
    def on_gpu(self) -> bool:
        """True if it trains on GPUs, one process each."""
        return self.resources.gpus > 0

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.resources.nodes * self.resources.devices

    def dump(self) -> str:
        """The job as text, for :func:`load_job`."""
        return json.dumps(self.model_dump(mode="json"))


def load_job(text: bytes) -> Job[Any]:
    """The job that another process has dumped."""
    given = json.loads(text)
    stage: Any = importlib.import_module(f"stages.{given['stage']}.run")
    job: Job[Any] = Job[stage.STAGE.params].model_validate(given)
    return job


def train(ctx: StageContext[P], *, models: Sequence[str], files: Sequence[str]) -> None:
    """Trains; anew with half the tokens at once if memory did not suffice.

    Args:
        ctx: The stage call.
        models: Names of the inputs that are models, of which the request may lack some.
        files: Names of the inputs that are files.

    Raises:
        UserError: Parameters, models or data are wrong, or memory never suffices.
        StoppedError: SIGTERM came; a checkpoint is saved.
        StageFailedError: A worker failed.
    """
    ctx.telemetry_path("metrics.jsonl")
    job: Job[P] = Job(
        stage=ctx.params.stage,
        params=ctx.params,
        seed=ctx.seed,
        models=_sources(ctx, models),
        files={name: tuple(ctx.paths(name)) for name in files},
        out=ctx.out,
        work=ctx.work,
        resources=ctx.resources,
    )
    while True:
        try:
            _train_once(job, ctx.events)
            return
        except OutOfMemoryError as error:
            # Another node's program has ended with its workers and would not come again.
            if error.smaller is None or ctx.resources.nodes > 1:
                raise
            said, smaller = error.said, error.smaller
        # Memory of the failed attempt is released only now that its exception is gone.
        gc.collect()
        ctx.events.warning(
            f"out of memory ({said}): going on with micro_batch_tokens = {smaller} in place of "
            f"{job.params.micro_batch_tokens}"
        )
        params = job.params.model_copy(update={"micro_batch_tokens": smaller})
        job = job.model_copy(update={"params": params})


def _train_once(job: Job[P], events: Emitter) -> None:
    if job.world_size == 1 and not job.params.needs_workers:
        from stages.training.fit import run_fit

        with deferred_stop() as stop:
            run_fit(job, Process(0, 0, 1, events, stop.is_set))
        return
    from stages.training.node import host

    with host(job) as node:
        if job.resources.nodes > 1:
            events.info(
                f"waiting for {job.resources.nodes - 1} times "
                f"`python -m stages.training.node {job.work}`"
            )
        node.train(events)


def _sources(ctx: StageContext[Any], names: Sequence[str]) -> dict[str, ModelSource]:
    """The models that the request has; equal if they have the same weights."""
    found: dict[str, ModelSource] = {}
    by_digest: dict[tuple[str, ...], ModelSource] = {}
    for name in names:
        if ctx.has(name):
            # The model and its adapter, if it has one.
            parts = (*ctx.inputs[name], *ctx.inputs.get(adapter_input(name), ()))
            digests = tuple(each.source.digest for each in parts)
            found[name] = by_digest.setdefault(digests, ctx.model(name))
    return found


@dataclass(frozen=True)
class Process:
    """One of the processes that train together.

    Attributes:
        rank: Its number, from 0.
        local_rank: Its number among the processes of its node, from 0; the number of its GPU.
        world_size: How many there are.
        events: Where it reports to; only rank 0's is read.
        stop_requested: Whether SIGTERM came.
    """

    rank: int
    local_rank: int
    world_size: int
    events: Emitter
    stop_requested: StopRequested

    @property
    def is_first(self) -> bool:
        """True in the process that writes files and reports."""
        return self.rank == 0

    def check_stop(self) -> None:
        """Raises StoppedError if SIGTERM came; for places where nothing needs to be saved."""
        if self.stop_requested():
            raise StoppedError("asked to stop (SIGTERM)")

    def check_stop_together(self, device: Any) -> None:
        """Raises StoppedError in all processes if SIGTERM came to any; a collective call."""
        if self.any([self.stop_requested()], device)[0]:
            raise StoppedError("asked to stop (SIGTERM)")

    def any(self, flags: Sequence[bool], device: Any) -> list[bool]:
        """Each flag, true if it is in some process; a collective call."""
        if self.world_size == 1:
            return list(flags)
        import torch
        import torch.distributed as dist

        box = torch.tensor(flags, dtype=torch.int, device=device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in box.tolist()]

    def sum(self, values: Any) -> Any:
        """A tensor added up over all processes, in place; a collective call."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(values)
        return values

    def agreed(self, value: Any) -> Any:
        """The first process's value, in all; a collective call."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def barrier(self) -> None:
        """Waits for the other processes."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()


class OutOfMemoryError(UserError):
    """Training did not fit into memory.

    Args:
        message: How long the longest sample is, and what was said.
        remedy: Settings to lower.
        said: What was said.
        smaller: A budget of tokens with which it may fit; None if a smaller one would not help.
    """

    def __init__(
        self, message: str, remedy: str = "", said: str = "", smaller: int | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.said = said
        self.smaller = smaller
