"""Command ``geb init``: the folder of a new task, which runs as it is."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flows.commands.common import NewFolder, console
from flows.pipeline.loading import load_config
from flows.report.files import new_folder, render
from flows.runners.local.gpus import gpus_of_this_host

_TEMPLATES = ("flows.commands", "templates/init")
_FILES = ("geb.yaml", "README.md", "oracle.py", "test_oracle.py")
# Longest name of a run.
_MAX_NAME = 100
_SAMPLES = Path(__file__).parents[2] / "data/quickstart"
# Weights of a model with less than a billion parameters.
_SMALL_BYTES = 2 << 30


def init(
    folder: NewFolder,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model to train, a folder or hub id; a tiny sample model if left out.",
        ),
    ] = None,
) -> None:
    """Make the folder of a task: configuration, reward function with a test, sample prompts."""
    target = folder.expanduser().absolute()
    if policy is not None and Path(policy).expanduser().exists():
        # The configuration's paths start in its own folder.
        policy = str(Path(policy).expanduser().absolute())
    with new_folder(target):
        write_task(target, policy)
    console.print(f"{target} is ready; what each file is: {target / 'README.md'}", markup=False)
    console.print(
        f"next: [bold]cd {escape(shlex.quote(str(folder)))}[/], then [bold]geb run geb.yaml[/]"
    )


def write_task(folder: Path, policy: str | None) -> None:
    """Writes the files of a task; without a policy, the task makes a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-._")
    values = {
        "policy": policy,
        "name": name[:_MAX_NAME] or "task",
        "is_small": policy is not None and 0 < _bytes_of_weights(Path(policy)) < _SMALL_BYTES,
        "gpus": len(gpus_of_this_host()),
        "store": str(folder / "store"),
    }
    for file in _FILES:
        (folder / file).write_text(render(f"{file}.jinja", _TEMPLATES, **values), encoding="utf-8")
    shutil.copyfile(_SAMPLES / "prompts.jsonl", folder / "prompts.jsonl")
    if policy is None:
        shutil.copyfile(_SAMPLES / "sft.jsonl", folder / "conversations.jsonl")
    load_config(folder / "geb.yaml")


def _bytes_of_weights(folder: Path) -> int:
    """Size of a local model's weights; 0 for a model of the hub."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
