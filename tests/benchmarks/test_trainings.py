"""Training against TRL's has one loss curve; the benchmark on GPUs has trainings of the stage."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import SHARDS, train_params
from benchmarks.training.shapes import SHAPES


@pytest.mark.slow
def test_both_contestants_train_and_have_one_curve():
    command = [sys.executable, "-m", "benchmarks.train_vs_trl", "--json"]
    command += ["--shapes", "head-heavy", "--pairs", "8", "--scale", "0.1"]
    command += ["--contestants", "TRL, default", "ours"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout[ended.stdout.index("{\n") :])["rows"]
    assert [row["name"] for row in rows] == ["TRL, default", "ours"]
    theirs, ours = (row["losses"] for row in rows)
    assert len(ours) == 2, "batches of four pairs"
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert rows[1]["margins"] == pytest.approx(rows[0]["margins"], abs=1e-4)
    assert rows[1]["margins"][1] != 0.0


@pytest.mark.parametrize("shards", SHARDS)
def test_each_way_to_split_a_training_is_one_of_the_stage(shards):
    params = train_params(SHAPES["llama-1b"], shards, 16)
    assert params.in_shards == (shards == "3")
    assert params.needs_workers == (shards != "off")
