"""One server of a judge for a run's score steps, against one for each step.

    python -m benchmarks.served_judge JUDGE --python .venv-vllm/bin/python

JUDGE is a chat model (`geb fetch smollm2 --quiet`). Four steps score 32 answers each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from flows.execution.step_executor import StepExecutor
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.pipeline.step import Step
from stages.tables.schemas import RESPONSES, write_table
from tests.stage_calls import file_input, response

_STEPS, _ROWS = 4, 32
_QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.yaml"


def score_step(config: RunConfig, folder: Path, number: int) -> Step:
    """A step that scores answers of its own."""
    path = folder / f"responses-{number}.parquet"
    asked = (f"What is {each} plus {number}?" for each in range(_ROWS))
    write_table(path, RESPONSES, [response(each, 0, "I do not know.") for each in asked])
    judge = file_input(Path(str(config.inputs.oracle_model)))
    inputs = {"responses": [file_input(path)], "model": [judge]}
    return Step(f"base/score/{number}", config.score, inputs)


def seconds(judge: str, python: str, steps_of_a_run: int) -> float:
    """Wall time of all steps, so many in a run, in an empty store."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [
            f"store={folder / 'store'}",
            "inputs.oracle_code=null",
            f"inputs.oracle_model={judge}",
            f"execution.interpreters.serve={Path(python).absolute()}",
            "score.oracle=judge",
            # A small judge seldom gives a mark in the form that is asked for.
            "score.max_null_share=1",
            "score.judge.max_tokens=16",
        ]
        config = load_config(_QUICKSTART, settings)
        steps = [score_step(config, folder, number) for number in range(_STEPS)]
        began = time.monotonic()
        for first in range(0, _STEPS, steps_of_a_run):
            executor = StepExecutor(config)
            try:
                for step in steps[first : first + steps_of_a_run]:
                    executor.execute(step, {})
            finally:
                executor.stop()
        return time.monotonic() - began


def main() -> None:
    """Prints both times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("judge", help="folder of a chat model")
    parser.add_argument("--python", required=True, help="interpreter that has vLLM")
    asked = parser.parse_args()
    print(f"| servers | seconds for {_STEPS} steps of {_ROWS} answers |\n| --- | ---: |")
    for steps_of_a_run, what in ((_STEPS, "one for all steps"), (1, "one for each step")):
        print(f"| {what} | {seconds(asked.judge, asked.python, steps_of_a_run):.0f} |", flush=True)


if __name__ == "__main__":
    main()
