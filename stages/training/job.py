"""Description of a training that all its processes share, and of one of these processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from stages.contract.adapters import adapter_input
from stages.contract.context import ModelSource, StageContext
from stages.contract.errors import StoppedError
from stages.contract.events import Emitter
from stages.training.params import TrainingParams

P = TypeVar("P", bound=TrainingParams)
StopRequested = Callable[[], bool]


@dataclass(frozen=True)
class Job(Generic[P]):
    """One training, as every process of it needs to know it.

    Attributes:
        params: The stage's parameters.
        seed: Seed of the stage call.
        models: Models of the request by input name; equal if they have the same weights.
        files: Files of the request by input name.
        out: Folder of the artifact being written.
        work: Folder that survives failed attempts.
        logs: Folder for the trackers' own files.
        on_gpu: Train on GPUs, one process each.
        run: Name of the run, for trackers.
    """

    params: P
    seed: int
    models: Mapping[str, ModelSource]
    files: Mapping[str, tuple[Path, ...]]
    out: Path
    work: Path
    logs: Path
    on_gpu: bool
    run: str

    def dump(self) -> str:
        """The job as JSON, for a worker process."""
        fields = {name: getattr(self, name) for name in ("seed", "on_gpu", "run")}
        fields |= {name: str(getattr(self, name)) for name in ("out", "work", "logs")}
        fields["models"] = {name: asdict(model) for name, model in self.models.items()}
        fields["files"] = {
            name: [str(path) for path in paths] for name, paths in self.files.items()
        }
        fields["params"] = self.params.model_dump(mode="json")
        return json.dumps(fields | {"stage": self.params.stage})

    @classmethod
    def parse(cls, text: str, params: type[P]) -> Job[P]:
        """Reads what :meth:`dump` wrote."""
        fields = json.loads(text)
        del fields["stage"]
        fields["params"] = params.model_validate(fields["params"])
        fields["models"] = {name: ModelSource(**model) for name, model in fields["models"].items()}
        fields["files"] = {
            name: tuple(Path(path) for path in paths) for name, paths in fields["files"].items()
        }
        return cls(**fields | {name: Path(fields[name]) for name in ("out", "work", "logs")})


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
        params=ctx.params,
        seed=ctx.seed,
        models=found,
        files={name: tuple(ctx.paths(name)) for name in files},
        out=ctx.out,
        work=ctx.work,
        logs=ctx.store.log_path(ctx.params.stage, ctx.work.name),
        on_gpu=ctx.resources.gpus > 0,
        run=ctx.run,
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
        """Raises StoppedError in all processes if SIGTERM came to any; a collective call.

        Args:
            device: Where this process computes.
        """
        if self.any([self.stop_requested()], device)[0]:
            raise StoppedError("asked to stop (SIGTERM)")

    def any(self, flags: Sequence[bool], device: Any) -> list[bool]:
        """Whether each flag is true in some process; a collective call.

        Args:
            flags: As many in each process.
            device: Where this process computes.
        """
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

    def mean(self, value: Any) -> Any:
        """Mean of a scalar tensor over all processes; a collective call."""
        if self.world_size == 1:
            return value
        import torch
        import torch.distributed as dist

        every = [torch.empty_like(value[None]) for _ in range(self.world_size)]
        dist.all_gather(every, value[None])
        return torch.cat(every).mean()

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
