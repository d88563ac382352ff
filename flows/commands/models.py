"""``geb models``, ``geb promote``, ``geb rollback``: the registry of trained models."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flows.commands.common import AsJson, StorePath, console, print_json
from stages.contract.registry import ModelRegistry
from stages.contract.store import Store

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
Alias = Annotated[str, typer.Option("--alias", help="Alias to move.")]


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    for command in (models, promote, rollback):
        app.command()(command)
