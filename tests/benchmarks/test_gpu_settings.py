"""Settings of the benchmark on GPUs: what it offers are trainings that the stage takes."""

import pytest

from benchmarks.gpu import SHARDS, train_params
from benchmarks.training.shapes import SHAPES


@pytest.mark.parametrize("shards", SHARDS)
def test_each_way_to_split_a_training_is_one_of_the_stage(shards):
    params = train_params(SHAPES["llama-1b"], shards, 16)
    assert params.in_shards == (shards == "3")
    assert params.needs_workers == (shards != "off")
