"""A run's steps one after the other, without Prefect.

    python -m benchmarks.plain_run CONFIG --set train.design=none --set seed=1

The same plan, store and record as `geb run`, so that `geb report` and `geb compare` read the
result: for machines that have no Prefect. ``--in-process`` saves each stage's start.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from flows.execution.run_record import recorded_run_attempt
from flows.execution.step_executor import StepExecutor, build_request
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.pipeline.step import Step
from stages.contract.events import Emitter
from stages.harness.program import execute
from stages.store.base import Artifact


def main() -> None:
    """Computes or finds each step, and says what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--in-process", action="store_true", help="stages run in this process")
    options = parser.parse_args()
    plain_run(load_config(options.config, options.set), options.in_process)


def plain_run(config: RunConfig, in_process: bool, last: str | None = None) -> dict[str, Artifact]:
    """Artifacts by step, each computed here or found in the store.

    With ``last``, only that step and what it needs are computed.
    """
    executor = StepExecutor(config)
    executor.record.save_config(config)
    steps = list(resolve_run(config).steps)
    if last is not None:
        steps = _needed(steps, last)
    artifacts: dict[str, Artifact] = {}
    with recorded_run_attempt(executor.record), Path(os.devnull).open("w") as nowhere:
        for step in steps:
            started = time.perf_counter()
            if in_process:
                stage = importlib.import_module(f"stages.{step.stage}.run").STAGE
                execute(
                    stage, build_request(config, executor.store, step, artifacts), Emitter(nowhere)
                )
            # What the stage has just made is found, and is on record.
            artifacts[step.name] = executor.execute(step, artifacts).artifact
            took = time.perf_counter() - started
            print(f"{config.name} {step.name}: {took:.1f} s", flush=True)
    return artifacts


def _needed(steps: Sequence[Step], last: str) -> list[Step]:
    """The step of that name, and all that lead to it, in their order."""
    needed = {last}
    for step in reversed(steps):
        if step.name in needed:
            needed.update(step.upstream())
    return [step for step in steps if step.name in needed]


if __name__ == "__main__":
    main()
