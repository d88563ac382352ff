"""Command ``geb doctor``: health of this machine and the place of a runner."""

import contextlib
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.commands.common import AsJson, ConfigStore, Overrides, chosen, console, print_json
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_settings
from flows.runners.choose import reap_for, runner_findings
from flows.runners.health import Finding
from flows.standing.home import Home
from stages.contract.errors import EXIT_FAILED, GebError
from stages.store.opening import cache_home, open_store

_MIN_FREE_GIB = 5


def doctor(
    store: ConfigStore = None,
    vllm: Annotated[Path, typer.Option(help="Interpreter of the vLLM environment.")] = Path(
        ".venv-vllm/bin/python"
    ),
    reap: Annotated[
        bool,
        typer.Option(
            "--reap",
            help="Remove containers (with --runner kubernetes: pods, slurm: jobs) whose "
            "orchestrator is gone, those that were to outlive it too.",
        ),
    ] = False,
    runner: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Look at the place of a runner: kubernetes, slurm."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file, for its settings of the runner.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check what a run needs of this machine; exit code 1 when something essential is missing."""
    configured = load_settings(config, chosen(overrides, store=store), RunConfig)
    if reap:
        for line in reap_for(runner, configured):
            typer.echo(line, err=as_json)
        if runner is not None:
            return
    if runner is not None:
        _show(list(runner_findings(runner, configured)), [], as_json)
        return
    standing = Home().standing()
    serves = f"{standing.ui}, store {standing.store}" if standing else "not running"
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    findings = [
        Finding("linux", sys.platform == "linux", platform.platform()),
        _import_check("torch environment", sys.executable, "torch, transformers, deepspeed"),
        _disk_check(cache_home() if "://" in configured.store else Path(configured.store)),
        _store_check(configured.store),
    ]
    optional = [
        _import_check("vLLM environment", str(vllm), "vllm"),
        _program_check("GPU", query, "stages run on the CPU"),
        Finding("geb up", standing is not None, serves),
        _docker_check(),
    ]
    _show(findings, optional, as_json)


def _show(findings: list[Finding], optional: list[Finding], as_json: bool) -> None:
    if as_json:
        print_json([vars(each) for each in (*findings, *optional)])
    else:
        for group, lacking in ((findings, "[red]✗[/]"), (optional, "[yellow]-[/]")):
            for each in group:
                mark = "[green]✓[/]" if each.ok else lacking
                console.print(f"{mark} {each.name}: {escape(each.detail)}")
    if not all(each.ok for each in findings):
        raise typer.Exit(EXIT_FAILED)


def _import_check(name: str, interpreter: str, modules: str) -> Finding:
    found = _program_check(name, [interpreter, "-c", f"import {modules}"], "make setup-vllm")
    # Some modules print warnings when Python imports them: the finding leaves them out.
    return Finding(name, found.ok, f"{interpreter} imports {modules}" if found.ok else found.detail)


def _program_check(name: str, command: list[str], without: str) -> Finding:
    """Finding of a program's call: the output, or the last line of stderr if the program fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return Finding(name, False, f"{command[0]}: {error.strerror} ({without})")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(name, False, f"{command[0]}: {last}")
    return Finding(name, True, done.stdout.strip().replace("\n", "; "))


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
    number = len(list(opened.artifacts()))
    return Finding("store", True, f"{opened.location}: {number} artifacts")


def _docker_check() -> Finding:
    from flows.runners.docker.container import connect

    try:
        with contextlib.closing(connect()) as client:
            version = client.version()["Version"]
    except GebError as error:
        return Finding("Docker", False, str(error).replace("\n", ";"))
    return Finding("Docker", True, f"engine {version} (geb images list shows the images)")
