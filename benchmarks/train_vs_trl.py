"""Plain DPO by TRL's trainer and by the train stage: tokens a second, memory, loss curves.

    python -m benchmarks.train_vs_trl                 # --json for JSON, --pairs 8 for a short one

Both train the same random Llama on the same pairs in the same order, each in a separate process,
in float32 on the CPU. The lengths are log-normal (prompts about 150 tokens, responses about 180).
The seconds of precomputed reference log-probabilities count. ``--device cuda`` trains a Llama of
random weights in bfloat16 on a GPU instead (``--shapes llama-8b --lora-rank 16``). ``--model`` and
``--pairs-of`` name a checkpoint and a pairs.parquet of a run in place of what is made up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.contestants import CONTESTANTS, Training, TrainingJob
from benchmarks.training.shapes import BATCH_PAIRS, SHAPES, make_model, make_pairs, take_pairs
from flows.runners.command_lines import thread_variables
from stages.contract.request import Resources

_COMPARED = ("TRL, default", "TRL, reference precomputed", "ours")
# Same objective, other order of summation: the curves may drift apart by this much.
_LOSS_TOLERANCE = 2e-3
# Matrix products, of which the fastest counts.
_TRIALS = 4
# With --model.
_PAIRS = 64
_TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class Row:
    """A contestant's line of the table.

    Attributes:
        shape: Name of the shape.
        name: The contestant.
        seconds: Median over the rounds.
        reference_seconds: Part of these seconds in the reference's own pass.
        tokens_per_second: Tokens of the data set (each response with its prompt) a second.
        speed: Times the first contestant's tokens per second.
        cpu_seconds: CPU time of all threads, in the round of the median.
        cpu_speed: The first contestant's CPU seconds over these.
        peak_mib: Largest over the rounds.
        memory: Share of the first contestant's.
        losses: Losses of the last round.
        margins: Mean differences of the implicit rewards, of the last round.
        share_of_matmul: Share of the machine's rate of matrix products, ours only.
        parts: Share of the time, ours only.
    """

    shape: str
    name: str
    seconds: float
    reference_seconds: float
    tokens_per_second: float
    speed: float
    cpu_seconds: float
    cpu_speed: float
    peak_mib: float
    memory: float
    losses: list[float]
    margins: list[float]
    share_of_matmul: float | None
    parts: dict[str, float]


def main() -> None:
    """Runs the contestants and prints the tables; exit code 1 where the curves differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=["head-heavy", "layer-heavy"]
    )
    parser.add_argument("--model", type=Path, help="a checkpoint in place of the shapes")
    parser.add_argument("--pairs-of", type=Path, help="its pairs: a pairs.parquet of a run")
    parser.add_argument("--batch-pairs", type=int, default=BATCH_PAIRS, help="pairs of a step")
    parser.add_argument(
        "--tokens-at-once", type=int, default=_TOKENS_AT_ONCE, help="with --model, our micro-batch"
    )
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=_COMPARED)
    parser.add_argument("--all", action="store_true", help="all contestants")
    parser.add_argument(
        "--rounds", type=int, default=1, help="number of repetitions, of which the median is taken"
    )
    parser.add_argument("--pairs", type=int, help="preference pairs; the shape's own if unset")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--lora-rank", type=int, default=0, help="adapters; 0 trains all weights")
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        metavar="N",
        help="number of busy processes that run at the same time",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    if options.all:
        options.contestants = list(CONTESTANTS)
    if options.model:
        options.shapes = [options.model.name]
    gpu = options.device == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    rate = matmul_flops_per_second(torch.device(options.device), dtype)
    with _busy_processes(options.beside):
        rows = [row for name in options.shapes for row in measure(name, options, rate, gpu=gpu)]
    if options.json:
        document = {"matmul_gflops_per_second": rate / 1e9, "rows": [asdict(row) for row in rows]}
        print(json.dumps(document, indent=2))
    else:
        print(f"matrix products: {rate / 1e9:,.0f} GFLOP/s on {torch.get_num_threads()} threads")
        for name in options.shapes:
            _print_table([row for row in rows if row.shape == name])
    sys.exit(not all(_curves_agree(rows, name) for name in options.shapes))


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Fastest of a few large matrix products: what the share of a step is measured against."""
    size = 8192 if device.type == "cuda" else 1024
    left = torch.ones((size, size), device=device, dtype=dtype)
    seconds = []
    for _ in range(_TRIALS):
        _wait_for(device)
        started = time.perf_counter()
        torch.mm(left, left)
        _wait_for(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(name: str, options: argparse.Namespace, rate: float, *, gpu: bool) -> list[Row]:
    """Trains one shape, or the model that is named, by every contestant, round by round."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        table = folder / "pairs.parquet"
        if options.model:
            model = options.model
            tokens_at_once = options.tokens_at_once
            count = options.pairs or _PAIRS
            pairs = take_pairs(options.pairs_of, model, table, num_pairs=count)
        else:
            shape = SHAPES[name]
            model = folder / "model"
            make_model(shape, model)
            tokens_at_once = shape.tokens_at_once
            count = options.pairs or shape.pairs
            pairs = make_pairs(shape, table, num_pairs=count, scale=options.scale)
        trained: dict[str, list[Training]] = {contestant: [] for contestant in options.contestants}
        for round_ in range(options.rounds):
            for place_, entrant in enumerate(options.contestants):
                work = folder / f"work-{round_}-{place_}"
                work.mkdir()
                job = TrainingJob(
                    model=str(model),
                    pairs=str(table),
                    folder=str(work),
                    batch_pairs=options.batch_pairs,
                    tokens_at_once=tokens_at_once,
                    gpu=gpu,
                    lora_rank=options.lora_rank,
                )
                trained[entrant].append(_train(entrant, job, work))
                print(f"{name}: {entrant} {trained[entrant][-1].seconds:.1f} s", file=sys.stderr)
    tokens = sum(
        2 * len(row["prompt_token_ids"]) + len(row["chosen_token_ids"])
        + len(row["rejected_token_ids"])
        for row in pairs
    )  # fmt: skip
    rows: list[Row] = []
    for entrant, rounds in trained.items():
        rows.append(_row(name, entrant, rounds, tokens, rate, rows[0] if rows else None))
    return rows


@contextmanager
def _busy_processes(number: int) -> Iterator[None]:
    """Processes that do nothing but use a CPU each, for the block."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _train(name: str, job: TrainingJob, work: Path) -> Training:
    job_file = work / "job.json"
    job_file.write_text(json.dumps(asdict(job)))
    command = [sys.executable, "-m", "benchmarks.training.contestants", name, str(job_file)]
    # Ours as runners start it.
    variables = thread_variables(Resources()) if name.startswith("ours") else {}
    log = work / "log.txt"
    with log.open("w") as file:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=file,
            env={**os.environ, **variables},
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{log.read_text()}")
    return Training(**json.loads(done.stdout))


def _row(
    shape: str, name: str, rounds: list[Training], tokens: int, rate: float, first: Row | None
) -> Row:
    middle = sorted(rounds, key=lambda training: training.seconds)[len(rounds) // 2]
    seconds = statistics.median(training.seconds for training in rounds)
    peak = max(training.peak_mib for training in rounds)
    return Row(
        shape=shape,
        name=name,
        seconds=seconds,
        reference_seconds=middle.reference_seconds,
        tokens_per_second=tokens / seconds,
        speed=first.seconds / seconds if first else 1.0,
        cpu_seconds=middle.cpu_seconds,
        cpu_speed=first.cpu_seconds / middle.cpu_seconds if first else 1.0,
        peak_mib=peak,
        memory=peak / first.peak_mib if first else 1.0,
        losses=rounds[-1].losses,
        margins=rounds[-1].margins,
        share_of_matmul=middle.tflop * 1e12 / middle.seconds / rate if middle.tflop else None,
        parts={part: spent / middle.seconds for part, spent in middle.parts.items()},
    )


def _curves_agree(rows: list[Row], shape: str) -> bool:
    """True where all float32 contestants of a shape have the first one's loss curve."""
    curves = [row.losses for row in rows if row.shape == shape and "bfloat16" not in row.name]
    return all(
        abs(one - other) < _LOSS_TOLERANCE
        for curve in curves
        for one, other in zip(curve, curves[0], strict=True)
    )


def _print_table(rows: list[Row]) -> None:
    titles = ("seconds", "of them reference", "tokens/s", "speed", "CPU seconds", "CPU speed")
    titles += ("peak MiB", "memory", "last loss", "last margin")
    print(f"\n| {rows[0].shape} | {' | '.join(titles)} |")
    print("| --- |" + " ---: |" * len(titles))
    for row in rows:
        print(
            f"| {row.name} | {row.seconds:.1f} | {row.reference_seconds:.1f} "
            f"| {row.tokens_per_second:,.0f} | {row.speed:.2f}x "
            f"| {row.cpu_seconds:.1f} | {row.cpu_speed:.2f}x | {row.peak_mib:,.0f} "
            f"| {row.memory:.2f} | {row.losses[-1]:.4f} | {row.margins[-1]:.4f} |"
        )
    for row in rows:
        if row.share_of_matmul is not None:
            parts = _shares(row.parts)
            print(f"{row.name}: {row.share_of_matmul:.0%} of the matrix-product rate; {parts}")


def _shares(parts: dict[str, Any]) -> str:
    return ", ".join(f"{part} {share:.0%}" for part, share in parts.items())


if __name__ == "__main__":
    main()
