"""Training against TRL's has one loss curve."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.release
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
