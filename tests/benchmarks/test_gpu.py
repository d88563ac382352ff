"""The benchmark for GPUs on tiny shapes: each section ends and finds its numbers right."""

import json
import os
import subprocess
import sys

from benchmarks.gpu.__main__ import LIMITS


def test_every_section_runs_without_a_gpu(tmp_path):
    figures = tmp_path / "figures.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--output", str(figures)]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    lines = [json.loads(line) for line in figures.read_text().splitlines()]
    assert {line["section"] for line in lines} == set(LIMITS)
    assert all(line["agrees"] for line in lines if "agrees" in line)
    # Every variation of a model takes the same steps.
    assert all(line["most_apart"] < 1e-4 for line in lines if "most_apart" in line)


def test_a_section_without_time_is_reported_and_stops_no_other(tmp_path):
    figures = tmp_path / "figures.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--minutes", "0"]
    command += ["--only", "card", "head", "--output", str(figures)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    lines = [json.loads(line) for line in figures.read_text().splitlines()]
    assert [(line["section"], line["error"]) for line in lines] == [
        ("card", "no time was left"),
        ("head", "no time was left"),
    ]
