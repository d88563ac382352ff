"""Many shards in one run: wall time, memory, the server's database, and how fast the UI answers.

    python -m benchmarks.shards --shards 1000     # --computed, --parallel, --json

Runs one iteration of the quickstart, with that many shards, against a Prefect server with SQLite.
Without ``--computed`` all artifacts are in the store; with it each stage's program is started and
does nothing. Meanwhile somebody looks at the page of the flow run twice a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

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


def main() -> None:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1000, help="shards of the iteration")
    parser.add_argument("--computed", action="store_true", help="start every stage's program")
    parser.add_argument("--parallel", type=int, default=2, help="stages at the same time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(
            folder, "many-shards", iterations=1, shards=options.shards, parallel=options.parallel
        )
        if not options.computed:
            fill(loaded(config))
        with standing_server(folder) as api:
            run = geb_run(config, folder, api)
            size = database_mib(folder)
        steps = len(all_steps(loaded(config)))
    row = {
        "shards": options.shards,
        "steps": steps,
        "wall s": round(run.seconds, 1),
        "CPU s": round(run.cpu_seconds, 1),
        "orchestrator peak MiB": round(run.peak_mib),
        "database MiB": round(size, 1),
    }
    if options.json:
        answers = {
            what: {"median s": statistics.median(each), "max s": max(each), "looks": len(each)}
            for what, each in run.answers.items()
        }
        print(json.dumps(row | {"answers": answers}, indent=2))
        return
    print("| " + " | ".join(row) + " |")
    print("|" + " ---: |" * len(row))
    print("| " + " | ".join(f"{value:,}" for value in row.values()) + " |\n")
    print("| what the page asks for | median / slowest, ms |\n| --- | ---: |")
    for what, seconds in run.answers.items():
        print(f"| {what} | {describe(seconds)} |")


if __name__ == "__main__":
    main()
