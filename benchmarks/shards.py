"""Many shards in one run: wall time, memory, the server's database, and how fast the UI answers.

    python -m benchmarks.shards --shards 1000     # --computed, --parallel, --json
    python -m benchmarks.shards --shards 200 --runner slurm --parallel 200

Runs one iteration of the quickstart, with that many shards, against a Prefect server with SQLite.
Without ``--computed`` all artifacts are in the store; with it each stage's program is started and
does nothing. Meanwhile a client asks for the page of the flow run twice a second.

With ``--runner slurm`` each program is a job of the cluster that Slurm's commands reach, and the
calls that its controller gets are counted: nobody else may use it meanwhile. Temporary files are
where the nodes must see them (TMPDIR). Exit code 1 where squeue was called more often than
once in ``poll_seconds``, or the orchestrator took more than 400 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import slurm_calls
from benchmarks.orchestrated import (
    database_mib,
    describe,
    fill,
    geb_run,
    loaded,
    standing_server,
    write_config,
)
from flows.pipeline.algorithm import all_steps

# What jobs get of this environment: Python starts slowly without it on some virtual machines.
_CARRIED = ("OMP_NUM_THREADS", "PYTHONMALLOC", "GLIBC_TUNABLES")
_MOST_MIB = 400


def main() -> int:
    """Measures and prints tables; 1 where jobs of a cluster cost more than they may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1000, help="shards of the iteration")
    parser.add_argument("--computed", action="store_true", help="start every stage's program")
    parser.add_argument("--parallel", type=int, default=2, help="stages at the same time")
    parser.add_argument("--runner", choices=("process", "slurm"), default="process")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    slurm = options.runner == "slurm"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        carried = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        config = write_config(
            folder,
            "many-shards",
            iterations=1,
            shards=options.shards,
            parallel=options.parallel,
            execution={"runner": options.runner, "slurm": {"environment": carried}},
        )
        if not (options.computed or slurm):
            fill(loaded(config))
        counted = slurm_calls.counted() if slurm else contextlib.nullcontext({})
        with standing_server(folder) as api, counted as calls:
            run = geb_run(config, folder, api)
            size = database_mib(folder)
        steps = len(all_steps(loaded(config)))
        poll_seconds = loaded(config).execution.slurm.poll_seconds
    row = {
        "shards": options.shards,
        "steps": steps,
        "wall s": round(run.seconds, 1),
        "CPU s": round(run.cpu_seconds, 1),
        "orchestrator peak MiB": round(run.peak_mib),
        "database MiB": round(size, 1),
    }
    # The first call comes at once.
    polls = int(run.seconds / poll_seconds) + 1
    if slurm:
        row |= calls | {"polls that fit": polls}
    good = not slurm or (calls["squeue"] <= polls and run.peak_mib < _MOST_MIB)
    if options.json:
        answers = {
            what: {"median s": statistics.median(each), "max s": max(each), "looks": len(each)}
            for what, each in run.answers.items()
        }
        print(json.dumps(row | {"answers": answers}, indent=2))
    else:
        _print_tables(row, run.answers)
    return 0 if good else 1


def _print_tables(row: dict[str, float], answers: dict[str, list[float]]) -> None:
    print("| " + " | ".join(row) + " |")
    print("|" + " ---: |" * len(row))
    print("| " + " | ".join(f"{value:,}" for value in row.values()) + " |\n")
    print("| what the page asks for | median / slowest, ms |\n| --- | ---: |")
    for what, seconds in answers.items():
        print(f"| {what} | {describe(seconds)} |")


if __name__ == "__main__":
    sys.exit(main())
