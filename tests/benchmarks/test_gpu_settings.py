"""Settings of the benchmark on GPUs: what it offers are trainings that the stage takes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import SHARDS, Measured, keeping, train_params
from benchmarks.training.shapes import SHAPES


@pytest.mark.parametrize("shards", SHARDS)
def test_each_way_to_split_a_training_is_one_of_the_stage(shards):
    params = train_params(SHAPES["llama-1b"], shards, 16)
    assert params.in_shards == (shards == "3")
    assert params.needs_workers == (shards != "off")


def test_what_was_measured_before_a_failure_is_in_the_file(tmp_path: Path) -> None:
    def measured() -> Iterator[Measured]:
        yield Measured("train", 1.0)
        yield Measured("train, split", 2.0)
        raise RuntimeError("out of memory")

    output = tmp_path / "gpu.json"
    with pytest.raises(RuntimeError):
        for _ in keeping(output, {"gpu": "H100"}, measured()):
            pass
    found = json.loads(output.read_text())
    assert found["gpu"] == "H100"
    assert [each["tokens_per_second_per_gpu"] for each in found["measured"]] == [1.0, 2.0]
