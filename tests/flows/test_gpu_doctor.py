"""Commands for machines with GPUs: they say so on one that has none, and show what one has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flows.runners.local import gpu_health
from flows.runners.local.gpu_health import gpu_findings
from stages.contract.errors import UserError

ROOT = Path(__file__).parents[2]


def test_a_machine_without_gpu_is_a_person_s_mistake(monkeypatch):
    monkeypatch.setenv("GEB_GPUS", "")
    with pytest.raises(UserError, match="no NVIDIA GPU that stages may use") as caught:
        list(gpu_findings(Path("/nowhere/python")))
    assert "resources.<stage>.gpus: 0" in caught.value.remedy


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="exit code 64 of a machine without a GPU: with one the commands do their work",
)
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "flows.commands.cli", "doctor", "--gpu"],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"],
        ["-m", "benchmarks.gpu"],
    ],
    ids=["doctor", "tests", "benchmark"],
)
def test_without_a_gpu_each_command_ends_with_64(command):
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "GEB_GPUS": ""},
        check=False,
    )
    assert done.returncode == 64
    assert "no" in done.stdout + done.stderr
    assert "GPU" in done.stdout + done.stderr


def test_faults_that_a_trial_finds_are_findings(monkeypatch, tmp_path):
    """The program's answer on a machine whose torch is the build for CPUs."""
    monkeypatch.setenv("GEB_GPUS", "0,1")
    said = [{"name": "torch sees a GPU", "ok": False, "detail": "torch 2: no device"}]
    program = tmp_path / "answer.py"
    program.write_text(f"print({json.dumps(json.dumps(said))})")
    monkeypatch.setattr(gpu_health, "_TORCH", (str(program),))
    found = {each.name: each for each in gpu_findings(tmp_path / "no-python")}
    assert found["GPUs"].detail == "0, 1"
    assert not found["torch sees a GPU"].ok
    assert "make setup-vllm" in found["vLLM"].detail
