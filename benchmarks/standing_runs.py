"""`geb up` with many runs in a row: what its processes hold, and what its logs complain of.

    python -m benchmarks.standing_runs --runs 100      # --at-once 2, --port, --json

Each run is the quickstart's flow with a seed of its own over stages that do nothing, submitted to
the deployment ``iterate`` as the UI does. After each tenth, a row: memory, open files and threads
of all processes of `geb up`, files in /dev/shm, the database's size. Then `geb gc` goes over the
store. Exit code 1 if a run failed, or if a log has an error or a locked database.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient

from benchmarks.orchestrated import write_config
from flows.pipeline.loading import load_config
from flows.standing.home import Home, Standing
from flows.standing.server import free_port

_POLL_SECONDS = 0.5
_COMPLAINT = re.compile(r"database is locked|Traceback|\bERROR\b|\bCRITICAL\b")


@dataclass(frozen=True)
class Held:
    """Resources of the processes of `geb up` after some runs, whose own processes have ended."""

    runs: int
    seconds: float
    processes: int
    memory_mib: int
    open_files: int
    threads: int
    shared_memory_files: int
    database_mib: float


def _serves_a_run(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "prefect.engine" in words or "_workspace_supervisor" in words


def _held(standing: Standing, home: Path, runs: int, seconds: float) -> Held:
    first = psutil.Process(standing.pid)
    # The process of a run takes a moment to end after its last state.
    while any(_serves_a_run(each) for each in first.children(recursive=True)):
        time.sleep(_POLL_SECONDS)
    own = [first, *first.children(recursive=True)]
    database = sum(each.stat().st_size for each in (home / "prefect").glob("prefect.db*"))
    return Held(
        runs,
        seconds,
        len(own),
        sum(each.memory_info().rss for each in own) >> 20,
        sum(each.num_fds() for each in own),
        sum(each.num_threads() for each in own),
        len(list(Path("/dev/shm").iterdir())),
        round(database / 2**20, 1),
    )


def _parameters(config: Path, number: int) -> dict[str, Any]:
    values = json.loads(load_config(config).to_json())
    wanted = {"inputs", "generate", "execution", "iterations", "store"}
    own = {name: each for name, each in values.items() if name in wanted}
    return {"preset": "quickstart", "config": own | {"name": f"run-{number}", "seed": number}}


def _wait(client: SyncPrefectClient, waiting: dict[UUID, str], most: int) -> list[str]:
    """Waits until at most so many runs are not over; the names of those that failed."""
    failed = []
    while len(waiting) > most:
        for run in list(waiting):
            state = client.read_flow_run(run).state
            if state is not None and state.is_final():
                name = waiting.pop(run)
                failed += [] if state.is_completed() else [f"{name}: {state.name} {state.message}"]
        time.sleep(_POLL_SECONDS)
    return failed


def _complaints(home: Path) -> list[str]:
    return [
        f"{log.name}: {line.strip()[:200]}"
        for log in sorted(home.rglob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if _COMPLAINT.search(line)
    ]


def _geb(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "flows.commands.cli", *map(str, arguments)]


def main() -> int:
    """Starts `geb up`, submits the runs, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--port", type=int, default=0, help="any free one by default")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with TemporaryDirectory() as name:
        folder, home = Path(name), Path(name) / "home"
        config = write_config(folder, "small", iterations=1, shards=1, parallel=2)
        up = subprocess.Popen(
            _geb(
                *("up", "--home", home, "--store", folder / "store", "--limit", asked.at_once),
                *("--port", asked.port or free_port(), "--no-password"),
            ),
            env=os.environ | {"PREFECT_API_URL": ""},
            stdout=subprocess.DEVNULL,
            cwd=folder,
        )
        try:
            while (standing := Home(home).standing()) is None:
                if up.poll() is not None:
                    raise SystemExit("`geb up` has ended")
                time.sleep(_POLL_SECONDS)
            rows, failed, began = [_held(standing, home, 0, 0.0)], [], time.monotonic()
            with SyncPrefectClient(standing.api) as client:
                deployment = client.read_deployment_by_name("iterate/iterate").id
                waiting: dict[UUID, str] = {}
                for number in range(1, asked.runs + 1):
                    run = client.create_flow_run_from_deployment(
                        deployment, parameters=_parameters(config, number)
                    )
                    waiting[run.id] = f"run-{number}"
                    tenth = number % 10 == 0 or number == asked.runs
                    failed += _wait(client, waiting, 0 if tenth else asked.at_once)
                    if tenth:
                        seconds = round(time.monotonic() - began, 1)
                        rows.append(_held(standing, home, number, seconds))
                        sys.stderr.write(f"{rows[-1]}\n")
        finally:
            subprocess.run(_geb("down", "--home", home), check=False, stdout=subprocess.DEVNULL)
            up.wait()
        complaints = _complaints(home)
        gc = subprocess.run(
            _geb("gc", "--store", folder / "store", "--json"),
            capture_output=True,
            text=True,
            check=True,
        )
    found = {
        "rows": [asdict(each) for each in rows],
        "failed": failed,
        "complaints": complaints,
        "gc": json.loads(gc.stdout),
    }
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        header = list(rows[0].__dict__)
        print(f"| {' | '.join(header)} |\n|{' ---: |' * len(header)}")
        for row in rows:
            print(f"| {' | '.join(map(str, row.__dict__.values()))} |")
        for each in (*failed, *complaints[:20]):
            print(each)
        print(f"{len(failed)} runs failed, {len(complaints)} complaints in the logs")
    return int(bool(failed or complaints))


if __name__ == "__main__":
    sys.exit(main())
