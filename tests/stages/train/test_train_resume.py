"""A training that was killed or stopped goes on, and ends with the uninterrupted one's bytes."""

import signal

import pytest

from stages.store.base import Store
from tests.damage import alter, truncate
from tests.stages.train.train_helpers import at_step, request_for, run_until, train

pytestmark = pytest.mark.slow

LONG = {"epochs": 60, "target_ratio": 0.5}
EVERY = {"checkpoint_every_steps": 5}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, policy, pairs):
    return train(tmp_path_factory.mktemp("store"), policy, [pairs], **LONG)


def end_when(request, folder, number, due):
    """Runs the stage as a program and signals it at the first event that is ``due``."""
    return run_until(request, folder, due, lambda process: process.send_signal(number))[0]


def work_of(request):
    return Store.in_folder(request.store).work_path(request.stage, request.key)


@pytest.mark.parametrize("step", [1, 23])
def test_after_sigkill_a_retry_ends_with_the_same_bytes(
    tmp_path, policy, pairs, uninterrupted, step
):
    request = request_for(tmp_path / "store", policy, [pairs], **LONG, **EVERY)
    assert end_when(request, tmp_path, signal.SIGKILL, at_step(step)) == -signal.SIGKILL
    assert Store.in_folder(request.store).load(request.stage, request.key) is None

    resumed = train(tmp_path / "store", policy, [pairs], **LONG, **EVERY)

    assert resumed.steps[-1] == resumed.summary["steps"]
    if step > EVERY["checkpoint_every_steps"]:
        assert resumed.steps[0] > step - 2 * EVERY["checkpoint_every_steps"]
    assert resumed.weights == uninterrupted.weights
    assert resumed.artifact.manifest.digest("") == uninterrupted.artifact.manifest.digest("")
    assert [record["step"] for record in resumed.records] == list(range(1, len(resumed.losses) + 1))


def test_sigterm_saves_before_the_stage_ends(tmp_path, policy, pairs, uninterrupted):
    request = request_for(tmp_path / "store", policy, [pairs], **LONG)
    assert end_when(request, tmp_path, signal.SIGTERM, at_step(4)) == 143
    [checkpoint] = (work_of(request) / "checkpoints").iterdir()
    resumed = train(tmp_path / "store", policy, [pairs], **LONG)

    assert resumed.steps[0] == step_of(checkpoint) + 1
    assert resumed.weights == uninterrupted.weights


@pytest.mark.parametrize(
    ("changes", "units"),
    [
        ({}, ["steps"]),
        # Other kernels, or bfloat16 weights: policy and reference would not be computed alike.
        ({"row_layout": "padded"}, ["parts", "steps"]),
        ({"deepspeed": {"zero_stage": 1}}, ["parts", "steps"]),
    ],
    ids=str,
)
def test_a_retry_computes_what_rounds_differently_again(tmp_path, policy, pairs, changes, units):
    request = request_for(tmp_path / "store", policy, [pairs], **LONG)
    end_when(request, tmp_path, signal.SIGKILL, at_step(1))
    resumed = train(tmp_path / "store", policy, [pairs], **LONG, **changes)
    counted = {event["unit"] for event in resumed.events if event["type"] == "progress"}
    assert sorted(counted) == units


def step_of(checkpoint):
    return int(checkpoint.name.removeprefix("checkpoint-"))


@pytest.mark.parametrize(
    ("layout", "damage"),
    [
        ({}, truncate),
        pytest.param(
            {"processes": 2, "deepspeed": {"zero_stage": 2}}, alter, marks=pytest.mark.release
        ),
    ],
)
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(
    tmp_path, policy, pairs, layout, damage
):
    # 112 steps: no third checkpoint is due, so that a kill meets none being written or removed.
    settings = {"epochs": 28, "checkpoint_every_steps": 40, **layout}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    request = request_for(tmp_path / "store", policy, [pairs], **settings)
    end_when(request, tmp_path, signal.SIGKILL, at_step(81))
    before, newest = sorted((work_of(request) / "checkpoints").glob("checkpoint-*"), key=step_of)
    files = [file for file in newest.rglob("*") if file.is_file()]
    largest = max(files, key=lambda each: each.stat().st_size)
    damage(largest)

    resumed = train(tmp_path / "store", policy, [pairs], **settings)

    [warning] = resumed.warnings
    assert str(largest) in warning
    assert "Set aside as damaged-" in warning
    assert resumed.steps[0] == step_of(before) + 1
    assert resumed.weights == whole.weights
    assert resumed.losses == whole.losses
