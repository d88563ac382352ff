"""Speed and memory of the score stage, and how far scoring hides behind generating.

    python -m benchmarks.scoring --rows 1000000           # a programmatic oracle on made-up rows
    python -m benchmarks.scoring --overlap                # generate and score of a small run

The first runs the stage as a program, as the flow does, and prints rows, wall time, rows a second
and the peak of resident memory; exit code 1 above 1 GiB.

The second runs a flow of one iteration, eight shards, with two stages at a time
(``execution.parallel: 2``) and reads from the run's records when each shard was generated and
scored. The oracle waits on purpose, so that scoring takes about as long as sampling whatever the
machine. ``--json`` prints the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.inputs import file_input
from stages.contract.digests import prompt_id
from stages.contract.request import make_request
from stages.score.params import ScoreParams
from stages.store.base import Store
from stages.tables.schemas import RESPONSES, TableWriter

ROOT = Path(__file__).parents[1]
LIMIT_MIB = 1024
_WORDS = [f"word{number}" for number in range(4000)]
_SAMPLES, _TOKENS = 2, 100
_LENGTH_ORACLE = """
def score(prompts, responses, references):
    return [len(response.split()) for response in responses]
"""
_SLOW_ORACLE = """
import time

def score(prompts, responses, references):
    time.sleep({seconds} * len(responses))
    return [len(response) % 7 for response in responses]
"""


def main() -> None:
    """Runs one of the two measurements and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000, help="responses to score")
    parser.add_argument(
        "--overlap", action="store_true", help="measure generate and score together"
    )
    parser.add_argument(
        "--oracle-seconds", type=float, default=0.04, help="time for one response, with --overlap"
    )
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder if unset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        if options.overlap:
            found = measure_overlap(Path(name), options.oracle_seconds)
        else:
            found = measure_rows(Path(name), options.rows)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for label, value in found.items():
            shown = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
            print(f"{label:<42} {shown:>12}")
    sys.exit(found.get("peak_mib", 0) > LIMIT_MIB)


def measure_rows(folder: Path, rows: int) -> dict[str, Any]:
    """Scores made-up responses with a programmatic oracle."""
    store = Store.open(str(folder / "store"), create=True)
    responses, oracle = folder / "responses.parquet", folder / "oracle.py"
    oracle.write_text(_LENGTH_ORACLE)
    with TableWriter(responses, RESPONSES) as writer:
        for row in _responses(rows):
            writer.write(row)
    files = {
        name: [file_input(path)] for name, path in (("responses", responses), ("code", oracle))
    }
    request = make_request(
        ScoreParams(oracle="python"), inputs=files, seed=0, store=str(store.root)
    )
    request.write(folder / "request.json")
    command = [sys.executable, "-m", "stages.score", str(folder / "request.json")]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    return {
        "responses": rows,
        "wall_seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "responses_per_second": rows / seconds,
        # Linux gives the peak in KiB.
        "peak_mib": usage.ru_maxrss / 1024,
    }


def measure_overlap(folder: Path, oracle_seconds: float) -> dict[str, Any]:
    """Runs a flow and compares its generate and score steps with the slower of the two."""
    oracle, config = folder / "oracle.py", folder / "overlap.yaml"
    oracle.write_text(_SLOW_ORACLE.format(seconds=oracle_seconds))
    config.write_text(yaml.safe_dump(_config(folder, oracle)))
    geb = [sys.executable, "-m", "flows.commands.cli"]
    subprocess.run([*geb, "run", str(config)], check=True, stdout=subprocess.DEVNULL)
    status = [*geb, "status", "overlap", "--store", str(folder / "store"), "--json"]
    output = subprocess.run(status, check=True, stdout=subprocess.PIPE, text=True).stdout
    records = {each["step"]: each for each in json.loads(output)["overlap"]["steps"]}
    spans = {
        stage: [
            (each["started"], each["ended"])
            for name, each in records.items()
            if name.startswith(f"iteration-1/{stage}/")
        ]
        for stage in ("generate", "score")
    }
    sums = {stage: sum(end - start for start, end in each) for stage, each in spans.items()}
    every = spans["generate"] + spans["score"]
    wall = max(end for _, end in every) - min(start for start, _ in every)
    return {
        "shards": len(spans["generate"]),
        "generate_seconds": sums["generate"],
        "score_seconds": sums["score"],
        "one_after_the_other_seconds": sum(sums.values()),
        "wall_seconds": wall,
        "wall_share_of_the_slower": wall / max(sums.values()),
    }


def _config(folder: Path, oracle: Path) -> dict[str, Any]:
    return {
        "extends": str(ROOT / "configs/quickstart.yaml"),
        "name": "overlap",
        "store": str(folder / "store"),
        "iterations": 1,
        "inputs": {"oracle_code": str(oracle)},
        "prepare": {"test_prompts": 16, "prompts_per_iteration": 1024},
        "sft": {
            "architecture": {"hidden_size": 32, "intermediate_size": 64},
            "epochs": 1,
            "global_batch_rows": 128,
        },
        "generate": {"num_shards": 8, "num_samples": 2},
        "evaluation": {"num_samples": 2},
        "promote": {"better_than_base_confidence": None, "no_regression": False},
        "execution": {"parallel": 2},
    }


def _responses(rows: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(0)
    for number in range(rows):
        messages = [{"role": "user", "content": f"{number // _SAMPLES} {_WORDS[number % 4000]}"}]
        if number % _SAMPLES == 0:
            identity = prompt_id(messages)
            asked = messages
        yield {
            "prompt_id": identity,
            "sample_index": number % _SAMPLES,
            "messages": asked,
            "reference_answer": None,
            "prompt_token_ids": draw.choices(range(32000), k=60),
            "response_token_ids": draw.choices(range(32000), k=_TOKENS),
            "response_logprobs": [-draw.random() for _ in range(_TOKENS)],
            "response": " ".join(draw.choices(_WORDS, k=55)),
            "finish_reason": "stop",
            "seed": number,
        }


if __name__ == "__main__":
    main()
