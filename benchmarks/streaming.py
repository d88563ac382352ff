"""Memory and speed of prepare and pair on a million prompts of generated rows.

    python -m benchmarks.streaming --rows 1000000

Runs both stages as programs, as the flow does, and prints for each: rows, wall time, rows a second
and the peak of resident memory. ``--json`` prints the same as JSON. The rows are made up: prompts
of some 300 characters, two responses of some 400 characters and 100 tokens each.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.inputs import file_input
from stages.contract.params import StageParams
from stages.contract.request import make_request
from stages.pair.params import PairParams
from stages.prepare.params import PrepareParams
from stages.store.base import Store
from stages.tables.schemas import PROMPTS, RESPONSES, SCORES, TableWriter, read_rows

LIMIT_MIB = 1024
_WORDS = [f"word{number}" for number in range(4000)]
_PROMPT_WORDS = 40
_RESPONSE_WORDS = 55
_PROMPT_TOKENS = 60
_RESPONSE_TOKENS = 100


@dataclass(frozen=True)
class Measurement:
    """One stage's run as a program.

    Attributes:
        stage: Its name.
        rows: Rows that it read: prompts, or responses.
        wall_seconds: From start to exit.
        peak_mib: Largest resident memory of the process, in MiB.
    """

    stage: str
    rows: int
    wall_seconds: float
    peak_mib: float

    @property
    def rows_per_second(self) -> float:
        """Throughput."""
        return self.rows / self.wall_seconds


def main() -> None:
    """Makes the rows, runs the stages, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="prompts (two responses each)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder if unset")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = measure(Path(folder), options.rows)
    if options.json:
        print(json.dumps([asdict(measurement) for measurement in measured], indent=2))
        return
    print(f"{'stage':<8} {'rows':>10} {'wall s':>8} {'rows/s':>9} {'peak MiB':>9}")
    for measurement in measured:
        print(
            f"{measurement.stage:<8} {measurement.rows:>10,} {measurement.wall_seconds:>8.1f} "
            f"{measurement.rows_per_second:>9,.0f} {measurement.peak_mib:>9.0f}"
        )
    sys.exit(any(measurement.peak_mib > LIMIT_MIB for measurement in measured))


def measure(folder: Path, rows: int) -> list[Measurement]:
    """Runs prepare on ``rows`` prompts and pair on twice as many responses to them."""
    store = Store.in_folder(str(folder / "store"), create=True)
    source = folder / "prompts.jsonl"
    _write_prompts(source, rows)
    params = PrepareParams(iterations=1, test_prompts=1)
    prepared, prepare = _run(store, folder, params, {"train": source}, rows)
    responses = folder / "responses.parquet"
    scores = folder / "scores.parquet"
    num_responses = _write_responses(prepared / "iteration-1.parquet", responses, scores)
    inputs = {"responses": responses, "scores": scores}
    _, pair = _run(store, folder, PairParams(), inputs, num_responses)
    return [prepare, pair]


def _run(
    store: Store, folder: Path, params: StageParams, inputs: dict[str, Path], rows: int
) -> tuple[Path, Measurement]:
    files = {name: [file_input(path)] for name, path in inputs.items()}
    request = make_request(params, inputs=files, seed=0, store=str(store.root))
    request_path = folder / f"{params.stage}.json"
    request.write(request_path)
    command = [sys.executable, "-m", f"stages.{params.stage}", str(request_path)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    code = process.returncode = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}")
    # Linux gives the peak in KiB.
    measured = Measurement(params.stage, rows, wall, usage.ru_maxrss / 1024)
    return store.artifact_path(params.stage, request.key), measured


def _write_prompts(path: Path, rows: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            text = f"{number} " + " ".join(draw.choices(_WORDS, k=_PROMPT_WORDS))
            row = {"messages": [{"role": "user", "content": text}], "reference_answer": str(number)}
            file.write(json.dumps(row) + "\n")


def _write_responses(prompts: Path, responses: Path, scores: Path) -> int:
    draw = random.Random(1)
    with TableWriter(responses, RESPONSES) as rows, TableWriter(scores, SCORES) as scored:
        for row, score in _responses(prompts, draw):
            rows.write(row)
            scored.write(score)
    return rows.num_rows


def _responses(
    prompts: Path, draw: random.Random
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for prompt in read_rows(prompts, PROMPTS):
        prompt_tokens = draw.choices(range(32000), k=_PROMPT_TOKENS)
        for sample in range(2):
            key = {"prompt_id": prompt["prompt_id"], "sample_index": sample}
            yield (
                {
                    **key,
                    "messages": prompt["messages"],
                    "reference_answer": prompt["reference_answer"],
                    "prompt_token_ids": prompt_tokens,
                    "response_token_ids": draw.choices(range(32000), k=_RESPONSE_TOKENS),
                    "response_logprobs": [-draw.random() for _ in range(_RESPONSE_TOKENS)],
                    "response": " ".join(draw.choices(_WORDS, k=_RESPONSE_WORDS)),
                    "finish_reason": "stop",
                    "seed": sample,
                },
                {
                    **key,
                    "score": draw.random(),
                    "error": None,
                    "components": None,
                    "oracle": "benchmark",
                },
            )


if __name__ == "__main__":
    main()
