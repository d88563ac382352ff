"""Description of a training that all its processes share, and of one of these processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, SerializeAsAny

from stages.contract.adapters import adapter_input
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Emitter
from stages.harness.context import ModelSource, StageContext
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
        on_gpu: Train on GPUs, one process each.
    """

    model_config = ConfigDict(frozen=True)

    stage: str
    params: SerializeAsAny[P]
    seed: int
    models: dict[str, ModelSource]
    files: dict[str, tuple[Path, ...]]
    out: Path
    work: Path
    on_gpu: bool


def make_job(ctx: StageContext[P], *, models: Sequence[str], files: Sequence[str]) -> Job[P]:
    """The training that a stage call asks for.

    Args:
        ctx: The stage call.
        models: Names of the inputs that are models, of which the request may lack some.
        files: Names of the inputs that are files.
    """
    found: dict[str, ModelSource] = {}
    by_digest: dict[tuple[str, ...], ModelSource] = {}
    for name in models:
        if ctx.has(name):
            # The model and its adapter, if it has one.
            parts = (*ctx.inputs[name], *ctx.inputs.get(adapter_input(name), ()))
            digests = tuple(each.source.digest for each in parts)
            found[name] = by_digest.setdefault(digests, ctx.model(name))
    return Job(
        stage=ctx.params.stage,
        params=ctx.params,
        seed=ctx.seed,
        models=found,
        files={name: tuple(ctx.paths(name)) for name in files},
        out=ctx.out,
        work=ctx.work,
        on_gpu=ctx.resources.gpus > 0,
    )


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
