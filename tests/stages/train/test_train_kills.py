"""Worker processes killed at random steps, again and again: not a byte of the result changes."""

from __future__ import annotations

import os
import random

import pytest

from stages.contract.errors import StageFailedError
from tests.stages.train.train_helpers import Killer, make_pairs, train, workers_of

pytestmark = pytest.mark.slow

# Twelve steps of training.
SETTINGS = {"epochs": 4, "micro_batch_tokens": 32, "target_ratio": 0.5, "calibration_batches": 2}
NUM_STEPS = 12
LAYOUTS = {
    # ZeRO stage, processes, kills: ten under DeepSpeed's two sharded stages.
    "zero-2": (2, 1, 4),
    "zero-3": (3, 1, 3),
    "zero-2 in two processes": (2, 2, 1),
    "zero-3 in two processes": (3, 2, 2),
    "no DeepSpeed, two processes": ("off", 2, 1),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    # The last batch of an epoch has fewer pairs than there are micro-batches to fill.
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 21, ties=(3, 7))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_killed_at_random_steps_ends_with_the_same_bytes(
    tmp_path, policy, pairs, layout
):
    zero_stage, processes, kills = LAYOUTS[layout]
    settings = SETTINGS | {"deepspeed": {"zero_stage": zero_stage}, "processes": processes}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    assert len(whole.losses) == NUM_STEPS
    interrupted = [tmp_path / "store", policy, [pairs]]
    settings |= {"checkpoint_every_steps": 1}

    draw = random.Random(layout)
    # Not the last step: the training might end before the kill is felt.
    for step in sorted(draw.sample(range(1, NUM_STEPS - 1), kills)):
        killer = Killer(step, draw.randrange(2))
        with pytest.raises(StageFailedError, match=r"training process \d of \d failed"):
            train(*interrupted, on_event=killer, **settings)
        assert not workers_of(os.getpid())
    resumed = train(*interrupted, **settings)

    first = next(event for event in resumed.events if event["type"] == "metric")
    assert first["step"] > 1
    assert resumed.weights == whole.weights
    assert resumed.losses == whole.losses
    assert resumed.artifact.manifest.digest("") == whole.artifact.manifest.digest("")
