"""Resume point of a training: its newest whole checkpoint, if this layout can use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract.sealed import is_sealed, seal_folder
from stages.training.checkpoints import Checkpoint, newest_whole_step, read_checkpoint
from stages.training.job import Process
from stages.training.params import TrainingParams


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from.

    Attributes:
        checkpoint: The checkpoint.
        is_universal: DeepSpeed is to load its universal form.
    """

    checkpoint: Checkpoint
    is_universal: bool


def layout_of(params: TrainingParams, process: Process) -> dict[str, Any]:
    """Layout on which a checkpoint's files depend: DeepSpeed writes one set per process."""
    zero_stage = params.deepspeed.zero_stage
    if params.sharding == "fsdp2":
        return {"zero_stage": zero_stage, "sharding": params.sharding}
    if zero_stage == "off":
        return {"zero_stage": zero_stage}
    return {"zero_stage": zero_stage, "world_size": process.world_size}


def find_resume_point(folder: Path, layout: dict[str, Any], process: Process) -> ResumePoint | None:
    """The newest checkpoint, converted if another number of processes wrote it; all call this.

    Args:
        folder: Where whole checkpoints are.
        layout: The present one, as of :func:`layout_of`.
        process: This process.

    Returns:
        None where there is no checkpoint, or none that can be used.
    """
    # One process reads them through, and all take the same one.
    step = newest_whole_step(folder, process.events.warning) if process.is_first else None
    step = process.agreed(step)
    if step is None:
        return None
    found = read_checkpoint(folder, step)
    written = found.state["layout"]
    is_converted = written != layout
    if is_converted and not _can_convert(written, layout):
        process.events.warning(
            f"the checkpoint of step {found.step} is of another layout "
            f"({written}, now {layout}): training starts anew"
        )
        return None
    if is_converted:
        process.events.info(
            f"the checkpoint of step {found.step} was written by {written['world_size']} "
            f"processes, now there are {process.world_size}: converting it"
        )
        from stages.training import zero

        # Every node sees the folder: it is part of the store.
        if process.is_first and not is_sealed(found.path, zero.UNIVERSAL_MARK):
            zero.convert_to_universal(found.path)
            seal_folder(found.path)
        process.barrier()
    process.events.info(f"going on after step {found.step}")
    return ResumePoint(found, is_converted)


def _can_convert(written: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """True where a checkpoint of one layout can go on as another: only the processes may differ."""
    is_sharded = written["zero_stage"] != "off"
    return is_sharded and written["zero_stage"] == wanted["zero_stage"]
