"""The orchestrator stays light: importing it loads no machine-learning library."""

import subprocess
import sys

import pytest

MODULES = [
    "flows.iterate",
    "flows.commands.cli",
    "flows.pipeline.config",
]
HEAVY = ["torch", "transformers", "vllm", "deepspeed", "datasets"]


@pytest.mark.parametrize("module", MODULES)
def test_importing_flows_loads_no_machine_learning_library(module: str) -> None:
    code = f"import sys, {module}; print([each for each in {HEAVY} if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_line_answers_without_slow_libraries() -> None:
    slow = ["prefect", "scipy", "matplotlib"]
    code = (
        f"import sys, flows.commands.cli; print([name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
