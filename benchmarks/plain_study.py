"""The runs of `geb paper` without Prefect, a process each: many small runs on one GPU.

    python -m benchmarks.plain_study chat --kept results/chat --processes 12 --seconds 500 \
        --set inputs.policy=CHECKPOINT --set store=/dev/shm/store

Cell by cell: the values of its coefficient, then its seeds under the best. ``--kept`` is that of
`geb paper`, which makes the report of what lies there; a run that is kept loses its checkpoints.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import multiprocessing
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.plain_run import plain_run
from experiments import study
from experiments.paper.tables import paper_rows
from flows.pipeline.form import SETTINGS


class Jobs:
    """Runs still to start, those of the first cells first."""

    def __init__(self, rows: Sequence[study.Row], overrides: dict[str, Any], kept: Path) -> None:
        self._rows = list(rows)
        self._overrides = overrides
        self._kept = kept
        self._tuning = [study.tuning_runs([each], overrides) for each in rows]
        self._waiting: list[tuple[int, int, study.StudyRun]] = []
        self._count = itertools.count()
        self._known = set[str]()
        self._rewards: dict[str, float] = {}
        self._ended = set[str]()
        every = [each for own in self._tuning for each in own]
        for run in study.finished(every, kept):
            self._rewards[run.name] = run.figures()["mean_reward"]
            self._ended.add(run.name)
        for cell, runs in enumerate(self._tuning):
            self._add(cell, runs)
            self._add_reported(cell)

    def __len__(self) -> int:
        return len(self._waiting)

    def next(self) -> study.StudyRun:
        """The first run that waits."""
        return heapq.heappop(self._waiting)[2]

    def ended(self, name: str, reward: float | None) -> None:
        """Notes the mean reward of a run, None if it failed.

        A cell whose tuning runs have all ended gets its seeds under the best of them.
        """
        self._ended.add(name)
        if reward is not None:
            self._rewards[name] = reward
        for cell, runs in enumerate(self._tuning):
            if any(each.name == name for each in runs):
                self._add_reported(cell)

    def _add_reported(self, cell: int) -> None:
        own = self._tuning[cell]
        if all(each.name in self._ended for each in own):
            chosen = study.choose(own, self._rewards)
            self._add(cell, study.reported_runs([self._rows[cell]], self._overrides, chosen))

    def _add(self, cell: int, runs: Sequence[study.StudyRun]) -> None:
        done = {each.name for each in study.finished(runs, self._kept)}
        for each in runs:
            if each.name not in self._known | done:
                self._known.add(each.name)
                heapq.heappush(self._waiting, (cell, next(self._count), each))


def compute(run: study.StudyRun, kept: Path) -> float:
    """Computes and keeps a run; its mean reward."""
    made = plain_run(run.cell.config, in_process=True)
    found = study.finished([run])
    study.keep(found, kept)
    for step, artifact in made.items():
        if step.endswith("/train"):
            shutil.rmtree(artifact.path)
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    reward: float = found[0].figures()["mean_reward"]
    return reward


def main() -> None:
    """Starts runs until none is left or time is up; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scale")
    parser.add_argument("--kept", type=Path, required=True, help="folder of results as JSON")
    parser.add_argument("--only", action="append", default=[], help="as for `geb paper`")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time to stop after")
    options = parser.parse_args()
    started = time.monotonic()
    jobs = Jobs(paper_rows(options.scale, options.only), {SETTINGS: options.set}, options.kept)
    running: dict[Future[float], str] = {}
    failed: list[str] = []
    # A process for each run: memory of many trainings in one adds up (12 GB after nine).
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.processes, spawn, max_tasks_per_child=1)
    while (jobs or running) and (left := started + options.seconds - time.monotonic()) > 0:
        while len(running) < options.processes and jobs:
            run = jobs.next()
            running[pool.submit(compute, run, options.kept)] = run.name
        for each in wait(running, min(left, 60.0), FIRST_COMPLETED).done:
            name = running.pop(each)
            if (error := each.exception()) is not None:
                failed.append(name)
                print(f"{name} failed: {error!r}", flush=True)
                jobs.ended(name, None)
                continue
            print(f"{time.monotonic() - started:.0f} s: {name} {each.result():.3f}", flush=True)
            jobs.ended(name, each.result())
    print(f"{len(jobs) + len(running)} runs known to be left", flush=True)
    for process in multiprocessing.active_children():
        process.kill()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
