"""Command ``geb doctor``: health of this machine, its GPUs and the place of a runner."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.commands.common import AsJson, Overrides, StorePath, chosen, console, print_json
from flows.execution.run_record import RunRecord, runs
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_settings
from flows.runners.choose import reap_for, runner_findings
from flows.runners.health import Finding
from flows.runners.local.gpu_health import gpu_findings
from flows.standing.home import Home, default_home
from stages.contract.errors import GebError
from stages.contract.stores import cache_home, open_store

_MIN_PYTHON = (3, 11)
_MIN_FREE_GIB = 5


def register(app: typer.Typer) -> None:
    """Adds this command."""
    app.command()(doctor)


def doctor(
    store: StorePath = "store",
    vllm: Annotated[Path, typer.Option(help="Interpreter of the vLLM environment.")] = Path(
        ".venv-vllm/bin/python"
    ),
    reap: Annotated[
        bool,
        typer.Option(
            "--reap",
            help="Remove containers (with --runner kubernetes: pods, slurm: jobs) whose "
            "orchestrator is gone, those that were to outlive it too; mark flow runs of killed "
            "processes as Crashed on the server of PREFECT_API_URL.",
        ),
    ] = False,
    runner: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Look at the place of a runner: kubernetes, slurm."),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Try what only GPUs do; exit code 64 where this machine has none."
        ),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file, for its settings of the runner.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check what a run needs of this machine; exit code 1 when something essential is missing."""
    named = chosen(overrides, store=None if config else store)
    configured = load_settings(config, named, RunConfig)
    if reap:
        for line in reap_for(runner, configured):
            typer.echo(line, err=as_json)
        for line in _mark_crashed(store):
            typer.echo(line, err=as_json)
    if gpu:
        _show(list(gpu_findings(vllm)), [], as_json)
        return
    if runner is not None:
        _show(list(runner_findings(runner, configured)), [], as_json)
        return
    findings = [
        Finding("python", sys.version_info >= _MIN_PYTHON, platform.python_version()),
        Finding("linux", sys.platform == "linux", platform.platform()),
        _import_check("torch environment", sys.executable, "torch, transformers, deepspeed"),
        _disk_check(cache_home() if "://" in store else Path(store)),
        _store_check(store),
    ]
    optional = [
        _import_check("vLLM environment", str(vllm), "vllm"),
        Finding("GPU", *_gpu()),
        Finding("geb up", *_standing()),
        Finding("Docker", *_docker()),
    ]
    _show(findings, optional, as_json)


def _mark_crashed(store: str) -> Iterator[str]:
    """Tells the Prefect server which of the store's flow runs have crashed on this host."""
    if "PREFECT_API_URL" not in os.environ or not ("://" in store or Path(store).exists()):
        return
    # Imported here: Prefect takes seconds to load.
    from flows.execution.crashed import mark_crashed

    opened = open_store(store)
    for name in runs(opened):
        for each in mark_crashed(RunRecord(opened, name, refresh=False)):
            yield f"flow run {each} of run {name}: Crashed, its process was gone"


def _show(findings: list[Finding], optional: list[Finding], as_json: bool) -> None:
    if as_json:
        print_json([vars(each) for each in (*findings, *optional)])
    else:
        for group, lacking in ((findings, "[red]✗[/]"), (optional, "[yellow]-[/]")):
            for each in group:
                mark = "[green]✓[/]" if each.ok else lacking
                console.print(f"{mark} {each.name}: {escape(each.detail)}")
    if not all(each.ok for each in findings):
        raise typer.Exit(1)


def _import_check(name: str, interpreter: str, modules: str) -> Finding:
    try:
        done = subprocess.run(
            [interpreter, "-c", f"import {modules}"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return Finding(name, False, f"{interpreter}: {error.strerror} (make setup-vllm)")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(name, False, f"{interpreter}: {last}")
    return Finding(name, True, f"{interpreter} imports {modules}")


def _disk_check(store: Path) -> Finding:
    place = store.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 2**30
    return Finding("disk", free >= _MIN_FREE_GIB, f"{free:.0f} GiB free at {place}")


def _store_check(store: str) -> Finding:
    if "://" not in store and not Path(store).exists():
        return Finding("store", True, f"{store}: none yet, the first run makes it")
    try:
        opened = open_store(store)
    except GebError as error:
        return Finding("store", False, str(error))
    return Finding(
        "store", True, f"{opened.location}: {sum(1 for _ in opened.artifacts())} artifacts"
    )


def _gpu() -> tuple[bool, str]:
    if shutil.which("nvidia-smi") is None:
        return False, "none found (nvidia-smi is not on the path); stages run on the CPU"
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.returncode == 0, (done.stdout or done.stderr).strip().replace("\n", "; ")


def _docker() -> tuple[bool, str]:
    from flows.runners.docker.container import connect

    try:
        client = connect()
    except GebError as error:
        return False, str(error).replace("\n", ";")
    with contextlib.closing(client):
        return True, f"engine {client.version()['Version']} (geb images list shows the images)"


def _standing() -> tuple[bool, str]:
    standing = Home(default_home()).standing()
    if standing is None:
        return False, "not running; it serves the Prefect UI of this machine"
    return True, f"{standing.ui}, store {standing.store}"
