"""Loss curves on GPUs equal the CPU's, in packed and padded rows, under DeepSpeed and nccl."""

import json

import pytest
import torch

from stages.training.loop import TrainingLoop
from tests.gpu.programs import run_stage
from tests.stages.train.test_train_masters import ONE_STEP, RATE, changes
from tests.stages.train.train_helpers import request_for, train

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

# Tolerance of a loss of the order of 1 after a few steps at a high learning rate.
FLOAT32, BFLOAT16 = 2e-3, 5e-2
SETTINGS = {
    "off": {},
    "padded": {"row_layout": "padded"},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {"lora": {"rank": 4}},
    "zero-2": {"deepspeed": {"zero_stage": 2}},
    "zero-3": {"deepspeed": {"zero_stage": 3}},
    "zero-3, offload": {
        "deepspeed": {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    },
}


@pytest.fixture
def losses(tmp_path, policy, pairs):
    """Trains on a number of GPUs, or on the CPU, and returns the loss of each step."""

    def trained(gpus, **settings):
        request = request_for(tmp_path / f"store-{gpus}", policy, [pairs], gpus=gpus, **settings)
        folder = run_stage(request, tmp_path / f"on-{gpus}.json")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    return trained


@pytest.mark.parametrize("name", SETTINGS)
def test_a_curve_in_bfloat16_is_the_cpu_s(losses, name):
    settings = {"precision": "bfloat16", **SETTINGS[name]}
    cpu = losses(0, **settings)
    assert len(set(cpu)) > 1
    assert losses(1, **settings) == pytest.approx(cpu, abs=BFLOAT16)


@pytest.mark.parametrize("name", ["off", "zero-2", "zero-3", "zero-3, offload"])
def test_a_step_in_bfloat16_is_saved_whole(tmp_path, policy, pairs, name):
    settings = ONE_STEP | SETTINGS[name]
    request = request_for(tmp_path / "store", policy, [pairs], gpus=1, **settings)
    folder = run_stage(request, tmp_path / "request.json")
    moved = changes(folder / "checkpoint", policy)
    assert moved.abs().median() == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_curve_in_float32_is_the_cpu_s(losses, layout):
    settings = {"precision": "float32", "row_layout": layout}
    assert losses(1, **settings) == pytest.approx(losses(0, **settings), abs=FLOAT32)


@pytest.mark.parametrize("name", ["off", "zero-2", "zero-3"])
def test_two_gpus_over_nccl_have_the_curve_of_one(losses, name):
    if torch.cuda.device_count() < 2:
        pytest.skip("nccl takes one process for a GPU: two need two GPUs, and this machine has one")
    settings = {"precision": "float32", **SETTINGS[name]}
    assert losses(2, **settings) == pytest.approx(losses(1, **settings), abs=FLOAT32)


def test_a_micro_batch_waits_for_no_result(tmp_path, monkeypatch, policy, pairs):
    micro_batches = 0
    step = TrainingLoop.micro_step

    def watched(self, batch, *, last):
        nonlocal micro_batches
        micro_batches += 1
        # The first ones allocate, and load kernels.
        torch.cuda.set_sync_debug_mode("error" if micro_batches > 2 else "default")
        try:
            return step(self, batch, last=last)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainingLoop, "micro_step", watched)
    train(tmp_path / "store", policy, [pairs], gpus=1, micro_batch_tokens=48)
    assert micro_batches > 4
