"""Commands ``geb models``, ``geb promote``, ``geb rollback``: the registry of trained models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from flows.commands.common import AsJson, StorePath, console, print_json
from flows.report.fitting import FittedTable
from flows.report.table import formatted, interval_text
from stages.contract.registry import LATEST, ModelRegistry
from stages.contract.registry_records import Alias as AliasState
from stages.contract.registry_records import ModelVersion
from stages.contract.stores import open_store

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
_HEADER = ("model", "version", "aliases", "win rate", "mean reward", "made by")
Alias = Annotated[str, typer.Option("--alias", help="Alias to move.")]


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    for command in (models, promote, rollback):
        app.command()(command)


def models(store: StorePath = "store", as_json: AsJson = False) -> None:
    """List registered models, their versions and aliases."""
    registry = ModelRegistry(open_store(store))
    found = {name: registry.versions(name) for name in registry.names()}
    aliases = {name: registry.aliases(name) for name in found}
    if as_json:
        print_json(
            {
                name: {
                    "versions": [each.model_dump(mode="json") for each in versions],
                    "aliases": {each.alias: each.version for each in aliases[name]},
                }
                for name, versions in found.items()
            }
        )
        return
    rows = [
        _row(each, aliases[name], newest=each is versions[-1])
        for name, versions in found.items()
        for each in versions
    ]
    console.print(FittedTable("", _HEADER, rows, kept=3, left=6))


def _row(version: ModelVersion, aliases: Sequence[AliasState], *, newest: bool) -> list[str]:
    names = [each.alias for each in aliases if each.version == version.version]
    names += [LATEST] if newest else []
    return [
        version.name,
        str(version.version),
        " ".join(f"@{alias}" for alias in names),
        _win_rate(version.metrics),
        formatted(version.metrics.get("mean_reward"), ".3f"),
        f"{version.run}, {version.step}",
    ]


def _win_rate(metrics: Mapping[str, Any]) -> str:
    """The rate with its 95 % interval, where the registered metrics tell of how many prompts."""
    rate, prompts = metrics.get("win_rate"), metrics.get("compared_prompts")
    if rate is None or not prompts:
        return formatted(rate, ".3f")
    # Here, since scipy takes a second to load, and the other commands do without it.
    from flows.report.statistics import proportion

    interval = proportion(round(rate * prompts), prompts).interval
    return f"{rate:.3f}\n{interval_text(interval, '.3f')}"


def promote(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="NAME, NAME:VERSION or NAME@ALIAS.")
    ],
    store: StorePath = "store",
    alias: Alias = "production",
    reason: Annotated[str, typer.Option(help="Kept in the alias's history.")] = "by hand",
) -> None:
    """Move an alias to a version by hand; gates are not asked."""
    registry = ModelRegistry(open_store(store))
    version, artifact = registry.resolve(model)
    registry.set_alias(version.name, alias, version.version, reason=reason)
    where = artifact.address(version.checkpoint.path)
    console.print(f"{version.name}@{alias} is version {version.version}: {where}", markup=False)


def rollback(
    name: ModelName,
    store: StorePath = "store",
    alias: Alias = "production",
    reason: Annotated[str, typer.Option(help="Kept in the alias's history.")] = "by hand",
) -> None:
    """Move an alias back to the version that it meant before."""
    registry = ModelRegistry(open_store(store))
    moved = registry.rollback(name, alias, reason=reason)
    console.print(f"{name}@{alias} is version {moved.version}")
