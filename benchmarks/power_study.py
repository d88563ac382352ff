"""Does a bonus help a chat model where right answers are rare? f-DPO and two GEB designs, 16 seeds.

    python -m benchmarks.power_study run --policy CHECKPOINT --processes 2
    python -m benchmarks.power_study table

``run`` goes on where it was stopped: each finished run is a line of results/power/runs.jsonl.
results/power/README.md has the plan. It was written before the first run.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plain_run import plain_run
from flows.pipeline.loading import load_config
from flows.report.statistics import CONFIDENCE, holm

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results/power"
SEEDS = range(200, 216)
"""Seeds that no earlier study has used."""
BASELINE = "f-DPO"


@dataclass(frozen=True)
class Run:
    """One run of the study."""

    task: str
    """Configuration in configs/chat."""
    method: str
    settings: tuple[str, ...]
    """Frozen settings of the method, `NAME=VALUE`."""
    seed: int

    @property
    def name(self) -> tuple[str, str, int]:
        """Task, method and seed."""
        return self.task, self.method, self.seed


def planned_runs() -> list[Run]:
    """Every run of results/power/methods.csv, seed by seed: methods of one seed share samples."""
    with (FOLDER / "methods.csv").open(encoding="utf-8", newline="") as file:
        methods = list(csv.DictReader(file))
    return [
        Run(method["task"], method["method"], tuple(method["settings"].split()), seed)
        for seed in SEEDS
        for method in methods
    ]


def finished_runs(path: Path) -> list[dict[str, Any]]:
    """The lines of finished runs."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compute(run: Run, policy: str, store: str, others: tuple[str, ...]) -> dict[str, Any]:
    """Computes one run; its line for runs.jsonl."""
    import torch

    started = time.monotonic()
    overrides = [f"inputs.policy={policy}", f"store={store}", f"seed={run.seed}"]
    config = load_config(
        ROOT / f"configs/chat/{run.task}.yaml", [*overrides, *run.settings, *others]
    )
    slug = f"{run.task}-{'-'.join(run.settings)}-{run.seed}".replace("=", "_")
    config = config.model_copy(update={"name": slug})
    last = f"iteration-{config.iterations}/evaluate"
    # Training reads no evaluation, so evaluations of earlier iterations are left out.
    artifacts = plain_run(config, in_process=True, last=last)
    evaluated = artifacts[last].file("metrics.json")
    metrics = json.loads(evaluated.read_text(encoding="utf-8"))
    for step, artifact in artifacts.items():
        if step.endswith("/train"):
            shutil.rmtree(artifact.path)
    gpu = torch.cuda.is_available()
    gc.collect()
    return {
        "task": run.task,
        "method": run.method,
        "seed": run.seed,
        "mean_reward": metrics["mean_reward"],
        "mean_log_pi_ref": metrics["mean_log_pi_ref"],
        "precision": config.train.precision,
        "processor": torch.cuda.get_device_name() if gpu else platform.machine(),
        "seconds": round(time.monotonic() - started, 1),
    }


def run_all(options: argparse.Namespace) -> int:
    """Computes what is lacking until time is up; the number of failed runs."""
    path = FOLDER / "runs.jsonl"
    finished = {(line["task"], line["method"], line["seed"]) for line in finished_runs(path)}
    waiting = [run for run in planned_runs() if run.name not in finished]
    started = time.monotonic()
    failed = 0
    # Threads of processes that share cores wait for each other.
    threads = max(1, (os.cpu_count() or 1) // options.processes)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.processes, spawn, max_tasks_per_child=1)
    running: dict[Future[dict[str, Any]], Run] = {}
    while (waiting or running) and time.monotonic() - started < options.seconds:
        while waiting and len(running) < options.processes:
            run = waiting.pop(0)
            arguments = (options.policy, options.store, tuple(options.set))
            running[pool.submit(compute, run, *arguments)] = run
        for future in wait(running, 10.0, FIRST_COMPLETED).done:
            run = running.pop(future)
            error = future.exception()
            if error is not None:
                failed += 1
                print(f"{run.name} failed: {error!r}", flush=True)
                continue
            line = future.result()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            print(f"{run.name}: {line['mean_reward']:.3f}, {line['seconds']:.0f} s", flush=True)
    print(f"{len(waiting) + len(running)} runs are left", flush=True)
    for process in multiprocessing.active_children():
        process.kill()
    return failed


@dataclass(frozen=True)
class Difference:
    """A bonus against f-DPO in one task, paired by seed."""

    task: str
    method: str
    seeds: int
    baseline: float
    mean: float
    difference: float
    low: float
    high: float
    p: float


def differences(lines: Iterable[dict[str, Any]]) -> list[Difference]:
    """Mean reward of each bonus minus f-DPO's: Student's interval and test over pairs of seeds."""
    from scipy import stats

    rewards: dict[tuple[str, str], dict[int, float]] = {}
    for line in lines:
        rewards.setdefault((line["task"], line["method"]), {})[line["seed"]] = line["mean_reward"]
    results = []
    for (task, method), values in rewards.items():
        baseline = rewards.get((task, BASELINE), {})
        seeds = sorted(values.keys() & baseline.keys())
        if method == BASELINE or len(seeds) < 2:
            continue
        ours = [values[seed] for seed in seeds]
        theirs = [baseline[seed] for seed in seeds]
        test = stats.ttest_rel(ours, theirs)
        interval = test.confidence_interval(CONFIDENCE)
        results.append(
            Difference(
                task,
                method,
                len(seeds),
                statistics.fmean(theirs),
                statistics.fmean(ours),
                statistics.fmean(ours) - statistics.fmean(theirs),
                float(interval.low),
                float(interval.high),
                float(test.pvalue),
            )
        )
    return results


def table(lines: list[dict[str, Any]]) -> str:
    """The analysis as a Markdown table."""
    rows = differences(lines)
    corrected = holm([row.p for row in rows])
    text = "| task | method | seeds | f-DPO | method's | difference | p | p by Holm |\n"
    text += "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |\n"
    for row, p in zip(rows, corrected, strict=True):
        interval = f"{row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}]"
        text += (
            f"| {row.task} | {row.method} | {row.seeds} | {row.baseline:.3f} | {row.mean:.3f} "
            f"| {interval} | {row.p:.3f} | {p:.3f} |\n"
        )
    return text


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--policy", required=True, help="folder of SmolLM2-135M-Instruct")
    run.add_argument("--store", default="store-of-power-study")
    run.add_argument("--processes", type=int, default=1)
    run.add_argument("--seconds", type=float, default=float("inf"), help="time to stop after")
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    commands.add_parser("table")
    options = parser.parse_args()
    if options.command == "run":
        sys.exit(bool(run_all(options)))
    print(table(finished_runs(FOLDER / "runs.jsonl")), end="")


if __name__ == "__main__":
    main()
