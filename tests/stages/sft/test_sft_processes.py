"""The warm start in several processes and under ZeRO: the curve of one process, and its bytes."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stages.contract.errors import StageFailedError
from stages.contract.events import Emitter, Metric
from stages.contract.program import execute
from stages.contract.request import Resources
from stages.contract.store import Artifact
from stages.sft.params import ArchitectureParams, SftParams
from stages.sft.run import STAGE
from tests.stage_calls import request_for
from tests.stages.sft.test_sft_run import ARCHITECTURE, ROWS, losses, write_jsonl
from tests.stages.train.train_helpers import workers_of

pytestmark = pytest.mark.slow

# Fifteen steps, each of several micro-batches.
SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "global_batch_rows": 5,
    "micro_batch_tokens": 24,
    "learning_rate": 1e-2,
    "precision": "float32",
    "gradient_checkpointing": False,
}


class Killer(Emitter):
    """Kills the second worker when a step is reported, once."""

    def __init__(self, step: int) -> None:
        super().__init__(io.StringIO())
        self._step = step

    def emit(self, event: Any) -> None:
        super().emit(event)
        if isinstance(event, Metric) and event.step == self._step:
            self._step = 0
            workers_of(os.getpid())[1].send_signal(signal.SIGKILL)


def train(
    folder: Path, *, processes: int = 1, events: Emitter | None = None, **changes: Any
) -> Artifact:
    folder.mkdir(exist_ok=True)
    data = write_jsonl(folder / "data.jsonl", ROWS)
    params = SftParams(architecture=ArchitectureParams(**ARCHITECTURE), **SETTINGS | changes)
    request = request_for(params, {"data": data}, folder / "store")
    request = request.model_copy(update={"resources": Resources(processes=processes)})
    return execute(STAGE, request, events or Emitter(io.StringIO()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({"deepspeed": {"zero_stage": 2}}, 1),
        ({"deepspeed": {"zero_stage": 3}}, 2),
        ({"sharding": "fsdp2"}, 2),
    ],
)
def test_the_loss_curve_in_shards_is_that_of_one_process(tmp_path, plain, settings, processes):
    found = train(tmp_path, processes=processes, **settings)
    assert losses(found.path) == pytest.approx(losses(plain.path), rel=1e-3, abs=1e-3)
    expected = load_file(plain.path / "checkpoint" / "model.safetensors")
    saved = load_file(found.path / "checkpoint" / "model.safetensors")
    assert {name: each.shape for name, each in saved.items()} == {
        name: each.shape for name, each in expected.items()
    }
    assert found.manifest.key == plain.manifest.key


def test_two_processes_killed_and_resumed_end_with_the_same_bytes(tmp_path, plain):
    whole = train(tmp_path / "whole", processes=2)
    assert losses(whole.path) == pytest.approx(losses(plain.path), rel=1e-3, abs=1e-3)
    again = {"processes": 2, "checkpoint_every_steps": 1}
    with pytest.raises(StageFailedError, match="training process 1 of 2 failed: killed by SIGKILL"):
        train(tmp_path / "killed", events=Killer(6), **again)
    resumed = train(tmp_path / "killed", **again)
    assert losses(resumed.path) == losses(whole.path)
    assert resumed.manifest.digest("checkpoint") == whole.manifest.digest("checkpoint")
