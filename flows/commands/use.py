"""Commands ``geb export`` and ``geb chat``: a registered model in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.common import StorePath, console
from flows.report.exported import base_of, export, place_of
from stages.contract.adapters import base_of_adapter
from stages.contract.errors import EXIT_USER, GebError
from stages.contract.registry import ModelRegistry
from stages.contract.stores import open_store

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="NAME, NAME:VERSION or NAME@ALIAS of the registry.")
]


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    app.command("export")(export_model)
    app.command()(chat)


def export_model(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; new, or empty.")],
    store: StorePath = "store",
) -> None:
    """Copy a registered checkpoint or adapter, with a model card: lineage, figures, licence."""
    target = folder.expanduser().absolute()
    version = export(open_store(store), model, target)
    console.print(f"{version.name}:{version.version} is in {target}", markup=False)
    console.print(f"model card {target / 'README.md'}", markup=False)


def chat(
    model: Model,
    store: StorePath = "store",
    base: Annotated[
        bool, typer.Option(help="Let the model that training started from answer beside it.")
    ] = True,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
) -> None:
    """Talk to a registered model (transformers), beside its base; a message a line."""
    opened = open_store(store)
    version, artifact = ModelRegistry(opened).resolve(model)
    name = f"{version.name}:{version.version}"
    own = artifact.file(version.checkpoint.path)
    over = base_of_adapter(artifact.manifest, version.checkpoint.path)
    partners = [f"{name}={own if over is None else place_of(opened, over)}"]
    if base:
        found = base_of(opened, artifact)
        partners.append(f"base={found.folder or f'{found.name}@{found.revision}'}")
    worn = ["--adapter", f"{name}={own}"] if over is not None else []
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stages.generate.dialogue", *partners, *worn),
            *("--max-new-tokens", str(max_new_tokens), "--temperature", str(temperature)),
        ],
        check=False,
    )
    if done.returncode == EXIT_USER:
        # It has said why.
        raise typer.Exit(EXIT_USER)
    if done.returncode:
        raise GebError(f"the dialogue with {name} ended with exit code {done.returncode}")
