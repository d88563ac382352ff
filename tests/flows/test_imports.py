"""The orchestrator stays light: importing it loads no machine-learning library."""

import sys

import pytest

from tests.programs import run_program

HEAVY = ("torch", "transformers", "vllm", "deepspeed", "datasets")
SLOW = ("prefect", "scipy", "matplotlib")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [("flows.iterate, flows.pipeline.config", HEAVY), ("flows.commands.cli", (*HEAVY, *SLOW))],
    ids=["flow", "command line"],
)
def test_importing_loads_no_heavy_library(modules: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print([name for name in {unwanted} if name in sys.modules])"
    assert run_program(sys.executable, "-c", code).stdout.strip() == "[]"
