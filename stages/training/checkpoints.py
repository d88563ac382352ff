"""Mid-training checkpoints in the work folder: there whole and undamaged, or not used.

One is written under a temporary name, sealed with the digests of its files, fsynced and renamed.
The one before it stays, in case the newest turns out to be damaged, and goes before the next is
written: there are never more than two. A training goes on from the newest whole one that its layout
can use.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract.atomic import fsync
from stages.contract.digests import set_aside
from stages.contract.errors import DamagedArtifactError, DamagedRecordError
from stages.contract.manifest import FileRecord, describe_files, verify_files
from stages.contract.records import SealedRecord, read_record
from stages.training.engine import Engine, Process
from stages.training.metrics import StepLog
from stages.training.params import TrainingParams

STATE_FILE = "geb_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    step: int
    """Steps done."""
    path: Path
    state: dict[str, Any]
    """State that is kept with the engine's files."""


class CheckpointRecord(SealedRecord):
    """A checkpoint's state and its other files."""

    state: dict[str, Any]
    files: dict[str, FileRecord]


def newest_whole(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose files are unchanged; hashes them.

    Damaged ones are set aside in ``folder``, with a warning.
    """
    for step, path in reversed(_checkpoints(folder)):
        try:
            record = read_record(path / STATE_FILE, CheckpointRecord)
            verify_files(path, record.files)
        except (OSError, DamagedRecordError, DamagedArtifactError) as error:
            warn(f"{error}. Set aside as {set_aside(path).name}; an earlier checkpoint is used.")
        else:
            return Checkpoint(step, path, record.state)
    return None


def make_room(folder: Path, step: int) -> None:
    """Removes all checkpoints but the newest before ``step``, which is about to be written.

    A later one is of a training in another layout, which was given up.
    """
    earlier = [path for other, path in _checkpoints(folder) if other < step]
    for _, path in _checkpoints(folder):
        if path not in earlier[-1:]:
            shutil.rmtree(path)


def publish_checkpoint(written: Path, state: dict[str, Any], folder: Path) -> Path:
    """Seals a written ``checkpoint-<step>`` and moves it into ``folder``."""
    record = CheckpointRecord(state=state, files=describe_files(written))
    (written / STATE_FILE).write_text(record.model_dump_json(indent=2))
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*written.rglob("*"), written]:
        fsync(path)
    target = written.rename(folder / written.name)
    fsync(folder)
    return target


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        (int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    )


class Checkpoints:
    """The checkpoints of a training in its work folder; all processes make the same calls."""

    def __init__(self, work: Path, params: TrainingParams, process: Process) -> None:
        self._folder = work / "checkpoints"
        self._writing = work / ".writing"
        self._process = process
        self._layout = "torch"
        zero_stage = params.deepspeed.zero_stage
        if zero_stage != "off":
            # DeepSpeed writes one set of files per process.
            self._layout = f"ZeRO-{zero_stage} in {process.world_size} processes"

    def find_resume_point(self) -> Checkpoint | None:
        """The newest checkpoint that this layout can load; None if there is none."""
        process = self._process
        # One process reads them through, and all take the same one.
        newest: Checkpoint | None = None
        if process.is_first:
            newest = newest_whole(self._folder, process.events.warning)
        newest, *_ = process.gathered(newest)
        if newest is None:
            return None
        if newest.state["layout"] != self._layout:
            process.events.warning(
                f"the checkpoint of step {newest.step} was written by {newest.state['layout']}, "
                f"and the training now is {self._layout}: it starts again from its first step"
            )
            return None
        process.events.info(f"going on after step {newest.step}")
        return newest

    def save(self, step: int, engine: Engine, log: StepLog | None, state: dict[str, Any]) -> None:
        """Writes a checkpoint after ``step`` steps, which counts once it is whole.

        The first process has the ``log``.
        """
        if self._process.is_first:
            # An attempt that was killed may have left files of another layout.
            shutil.rmtree(self._writing, ignore_errors=True)
            make_room(self._folder, step)
        self._process.barrier()
        written = self._writing / f"checkpoint-{step}"
        written.mkdir(parents=True, exist_ok=True)
        engine.save(written)
        self._process.barrier()
        if log is not None:
            # The records of the steps that led to it.
            log.write_to(written)
            publish_checkpoint(written, state | {"layout": self._layout}, self._folder)
        # The others wait here: in a collective of DeepSpeed they would wait for minutes at most.
        self._process.barrier()
