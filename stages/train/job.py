"""What the processes of one training have in common, and who one of them is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from stages.contract.context import ModelSource
from stages.contract.errors import StoppedError
from stages.contract.events import Emitter
from stages.train.params import TrainParams

StopRequested = Callable[[], bool]


@dataclass(frozen=True)
class Job:
    """One training, as every process of it needs to know it.

    Attributes:
        params: The stage's parameters.
        seed: Seed of the stage call.
        policy: Model to start from.
        reference: Model of π_ref.
        same_model: Policy and reference are the same weights.
        pairs: PAIRS tables.
        out: Folder of the artifact being written.
        work: Folder that survives failed attempts.
        logs: Folder for the trackers' own files.
        on_gpu: Train on GPUs, one process each.
        run: Name of the run, for trackers.
    """

    params: TrainParams
    seed: int
    policy: ModelSource
    reference: ModelSource
    same_model: bool
    pairs: tuple[Path, ...]
    out: Path
    work: Path
    logs: Path
    on_gpu: bool
    run: str

    def dump(self) -> str:
        """The job as JSON, for a worker process."""
        fields = {name: getattr(self, name) for name in ("seed", "same_model", "on_gpu", "run")}
        fields |= {name: str(getattr(self, name)) for name in ("out", "work", "logs")}
        fields |= {"policy": asdict(self.policy), "reference": asdict(self.reference)}
        fields |= {"pairs": [str(path) for path in self.pairs]}
        return json.dumps(fields | {"params": self.params.model_dump(mode="json")})

    @classmethod
    def parse(cls, text: str) -> Job:
        """Reads what :meth:`dump` wrote."""
        fields = json.loads(text)
        fields["params"] = TrainParams.model_validate(fields["params"])
        fields["policy"] = ModelSource(**fields["policy"])
        fields["reference"] = ModelSource(**fields["reference"])
        fields["pairs"] = tuple(Path(path) for path in fields["pairs"])
        return cls(**fields | {name: Path(fields[name]) for name in ("out", "work", "logs")})


@dataclass(frozen=True)
class Process:
    """One of the processes that train together.

    Attributes:
        rank: Its number, from 0.
        local_rank: Its number among those of its node, from 0; that of its GPU.
        world_size: How many there are.
        events: Where it reports to; only that of rank 0 is read.
        stop_requested: Whether SIGTERM came.
    """

    rank: int
    local_rank: int
    world_size: int
    events: Emitter
    stop_requested: StopRequested

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def check_stop(self) -> None:
        """Raises StoppedError if SIGTERM came; for places where nothing needs to be saved."""
        if self.stop_requested():
            raise StoppedError("asked to stop (SIGTERM)")

    def barrier(self) -> None:
        """Waits for the other processes."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()
