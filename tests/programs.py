"""Programs that a test runs to their end, and needs of tests that a machine may lack."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VLLM_PYTHON = Path(os.environ.get("GEB_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))


def run_program(*command, **options):
    """Runs a program to its end, well or not; what it prints is kept."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def lacking(what):
    """Skips the test on a developer's machine; fails it in CI, which installs everything."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have it: {what}")
    pytest.skip(what)
