"""Cost of orchestration: per stage, and for a run whose artifacts are all in the store.

    python -m benchmarks.orchestration            # --json for JSON

Runs the quickstart's three iterations with stages that do nothing: once to compute them, once to
find them all; with a Prefect server of the run's own, and with one that stands. The cost of a stage
is the slope between runs of few and of many shards; a computed one includes the start of its two
processes (supervisor, Python).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.orchestrated import geb_run, loaded, standing_server, write_config
from flows.pipeline.algorithm import all_steps

FEW, MANY = 1, 11


def measure(folder: Path, api: str | None) -> dict[str, float]:
    """All figures with one kind of server."""
    found: dict[str, float] = {}
    steps: dict[int, int] = {}
    for shards in (FEW, MANY):
        place = folder / f"{'standing' if api else 'own'}-{shards}"
        place.mkdir()
        config = write_config(place, f"shards-{shards}", iterations=3, shards=shards, parallel=1)
        found[f"computed {shards}"] = geb_run(config, place, api).seconds
        found[f"cached {shards}"] = geb_run(config, place, api).seconds
        steps[shards] = len(all_steps(loaded(config)))
    more = steps[MANY] - steps[FEW]
    return {
        "steps": steps[FEW],
        "cached run s": found[f"cached {FEW}"],
        "computed run s": found[f"computed {FEW}"],
        "cached stage ms": 1000 * (found[f"cached {MANY}"] - found[f"cached {FEW}"]) / more,
        "computed stage ms": 1000 * (found[f"computed {MANY}"] - found[f"computed {FEW}"]) / more,
    }


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {"of the run's own": measure(folder, None)}
        with standing_server(folder) as api:
            results["standing"] = measure(folder, api)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    columns = list(next(iter(results.values())))
    print("| server | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for server, row in results.items():
        cells = [f"{value:.1f}" if value % 1 else f"{value:.0f}" for value in row.values()]
        print(f"| {server} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
