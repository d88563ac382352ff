"""Runs of ``geb run`` over trivial stages, measured: wall time, memory, the server's answers."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.trivial import ROOT, answer, interpreter
from flows.execution.step_executor import build_request
from flows.pipeline.algorithm import walk
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.pipeline.step import Output, Step
from stages.store.base import Artifact, Store

_POLL_SECONDS = 0.5


@dataclass
class Measured:
    """One run.

    Attributes:
        seconds: Wall time of the command.
        cpu_seconds: Processor time of the orchestrator and of all that it started and waited for.
        peak_mib: Largest resident memory of the orchestrator's process.
        answers: Seconds that each look of a person took, by what was looked at.
    """

    seconds: float
    cpu_seconds: float
    peak_mib: float
    answers: dict[str, list[float]] = field(default_factory=dict)


def write_config(
    folder: Path,
    name: str,
    *,
    iterations: int,
    shards: int,
    parallel: int,
    execution: dict[str, Any] | None = None,
) -> Path:
    """The quickstart with that many shards an iteration, its stages replaced by trivial ones."""
    values = {
        "extends": str(ROOT / "configs/quickstart.yaml"),
        "name": name,
        "iterations": iterations,
        "store": str(folder / "store"),
        "generate": {"num_shards": shards},
        # A fork server would run the stages themselves.
        "execution": {
            "parallel": parallel,
            "interpreters": interpreter(folder),
            "fork_server": False,
        }
        | (execution or {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def fill(config: RunConfig) -> None:
    """Puts an artifact for every step into the store."""
    store = Store.open(config.store, create=True)
    made: dict[str, Artifact] = {}

    def do(step: Step) -> Output:
        request = build_request(config, store, step, made)
        if store.load(request.stage, request.key) is None:
            answer(request)
        artifact = store.load(request.stage, request.key)
        assert artifact is not None
        made[step.name] = artifact
        return step.output

    walk(config, do)


def geb_run(config: Path, folder: Path, api: str | None) -> Measured:
    """Runs ``geb run`` to its end, against the server at ``api`` or with one of its own."""
    environment = os.environ | {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(ROOT)}
    environment.pop("PREFECT_API_URL", None)
    if api is not None:
        environment["PREFECT_API_URL"] = api
    started = time.monotonic()
    log = folder / f"{config.stem}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.commands.cli", "run", str(config)],
            env=environment,
            stdout=output,
            stderr=output,
        )
    answers: dict[str, list[float]] = {}
    ended = threading.Event()
    looker = threading.Thread(target=_look, args=(api, ended, answers))
    if api is not None:
        looker.start()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    ended.set()
    if api is not None:
        looker.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{config} failed:\n{log.read_text()[-2000:]}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Measured(seconds, cpu_seconds, usage.ru_maxrss / 1024, answers)


@contextmanager
def standing_server(folder: Path) -> Iterator[str]:
    """A Prefect server with a database of its own; yields the address of its API."""
    # Here: Prefect takes seconds to load.
    from flows.standing.server import free_port, start_server

    address = f"http://127.0.0.1:{free_port()}"
    environment = {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_API_URL": ""}
    server = start_server(address, folder / "server.log", environment)
    try:
        yield f"{address}/api"
    finally:
        server.communicate()


def database_mib(folder: Path) -> float:
    """Size of the server's database."""
    return sum(each.stat().st_size for each in (folder / "prefect").glob("prefect.db*")) / 2**20


def _look(api: str, ended: threading.Event, answers: dict[str, list[float]]) -> None:
    """Asks what the page of a flow run asks, as long as the run is at work."""
    with httpx.Client(base_url=api, timeout=60) as client:
        while not ended.wait(_POLL_SECONDS):
            body = {"sort": "START_TIME_DESC", "limit": 1}
            found = client.post("flow_runs/filter", json=body).json()
            if not found:
                continue
            run = found[0]["id"]
            of_run: dict[str, Any] = {"flow_runs": {"id": {"any_": [run]}}}
            logs = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200}
            for what, method, path, json in (
                ("flow run", "GET", f"flow_runs/{run}", None),
                ("graph", "GET", f"flow_runs/{run}/graph-v2", None),
                ("task runs", "POST", "task_runs/filter", {**of_run, "limit": 100}),
                ("count of task runs", "POST", "task_runs/count", of_run),
                ("logs", "POST", "logs/filter", logs),
                ("artifacts", "POST", "artifacts/filter", {**of_run, "limit": 100}),
            ):
                begun = time.monotonic()
                client.request(method, path, json=json).raise_for_status()
                answers.setdefault(what, []).append(time.monotonic() - begun)


def loaded(path: Path) -> RunConfig:
    """A configuration that :func:`write_config` wrote."""
    return load_config(path, [])


def describe(seconds: list[float]) -> str:
    """Median and largest of some times, in milliseconds."""
    return f"{1000 * statistics.median(seconds):.0f} / {1000 * max(seconds):.0f}"
