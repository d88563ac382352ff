"""The benchmark for GPUs on tiny shapes: each section ends and finds its numbers right."""

import json
import os
import sys

from benchmarks.gpu.__main__ import LIMITS
from tests.programs import run_program

# One process for all: most of a section's time goes into its imports.
ALL = """
import sys
from pathlib import Path
from benchmarks.gpu.__main__ import LIMITS, measure
for name in LIMITS:
    measure(name, Path(sys.argv[1]), dry=True)
"""


def test_every_section_runs_without_a_gpu(tmp_path):
    figures = tmp_path / "figures.jsonl"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    ended = run_program(sys.executable, "-c", ALL, figures, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    lines = [json.loads(line) for line in figures.read_text().splitlines()]
    assert {line["section"] for line in lines} == set(LIMITS)
    assert all(line["agrees"] for line in lines if "agrees" in line)
    # Every variation of a model takes the same steps.
    assert all(line["most_apart"] < 1e-4 for line in lines if "most_apart" in line)
