"""Worker processes killed at random steps: the training goes on as if nothing had happened.

With as many processes not a byte of the result changes. With another number torch goes on up to the
order of summation, and DeepSpeed starts again.
"""

import os
import random

import pytest

from stages.contract.errors import StageFailedError
from tests.stages.train.train_helpers import (
    assert_same_training,
    killer,
    make_pairs,
    train,
    workers_of,
)

pytestmark = pytest.mark.slow

# Twelve steps of training.
SETTINGS = {
    "epochs": 4,
    "micro_batch_tokens": 32,
    "target_ratio": 0.5,
}
NUM_STEPS = 12
KILLED_AT = 5


def zero(stage):
    return {"deepspeed": {"zero_stage": stage}}


LAYOUTS = {
    # Library, processes, kills.
    "zero-2": (zero(2), 1, 2),
    "zero-3": (zero(3), 1, 2),
    "zero-2 in two processes": (zero(2), 2, 1),
    "zero-3 in two processes": (zero(3), 2, 1),
    "no shards, two processes": ({}, 2, 1),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    # The last batch of an epoch has fewer pairs than there are micro-batches to fill.
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 21, ties=(3, 7))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("zero-2", marks=pytest.mark.release),
        pytest.param("zero-3", marks=pytest.mark.release),
        pytest.param("zero-2 in two processes", marks=pytest.mark.release),
        "zero-3 in two processes",
        "no shards, two processes",
    ],
)
def test_a_training_killed_at_random_steps_ends_with_the_same_bytes(
    tmp_path, policy, pairs, layout
):
    library, processes, kills = LAYOUTS[layout]
    settings = SETTINGS | library | {"processes": processes}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    assert len(whole.losses) == NUM_STEPS
    interrupted = [tmp_path / "store", policy, [pairs]]
    settings |= {"checkpoint_every_steps": 1}

    draw = random.Random(layout)
    # Not the last step: the training might end before the kill is felt.
    for step in sorted(draw.sample(range(1, NUM_STEPS - 1), kills)):
        with pytest.raises(StageFailedError, match=r"training process \d of \d failed"):
            train(*interrupted, on_event=killer(step, draw.randrange(2)), **settings)
        assert not workers_of(os.getpid())
    resumed = train(*interrupted, **settings)

    assert resumed.steps[0] > 1
    assert resumed.weights == whole.weights
    assert resumed.losses == whole.losses
    assert resumed.artifact.manifest.digest("") == whole.artifact.manifest.digest("")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("library", "before", "after", "rank"),
    [(zero(2), 1, 2, 4), (zero(3), 2, 1, 0), ({}, 2, 1, 4), ({}, 2, 3, 0)],
)
def test_another_number_of_processes_goes_on(tmp_path, policy, pairs, library, before, after, rank):
    settings = SETTINGS | library | {"lora": {"rank": rank, "alpha": 8.0}}
    settings |= {"checkpoint_every_steps": 1}
    whole = train(tmp_path / "whole", policy, [pairs], processes=before, **settings)
    interrupted = [tmp_path / "store", policy, [pairs]]
    with pytest.raises(StageFailedError, match="training process"):
        train(*interrupted, processes=before, on_event=killer(KILLED_AT), **settings)
    resumed = train(*interrupted, processes=after, **settings)

    starts_again = any(
        "starts again from its first step" in warning for warning in resumed.warnings
    )
    assert starts_again == bool(library)
    assert (resumed.steps[0] == 1) == bool(library)
    assert_same_training(resumed, whole)
