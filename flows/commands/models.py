"""Commands of registered models, ``geb models`` to ``geb export``."""

import re
from collections.abc import Mapping
from typing import Annotated

import typer

from flows.commands.common import AsJson, NewFolder, Registered, StorePath, answer, console
from flows.report.model_card import export_model as copy_model
from flows.report.table import FittedTable
from stages.contract.errors import UserError
from stages.store.opening import open_store
from stages.store.registry import LATEST, ModelRegistry, ModelVersion

_HEADER = ("model", "version", "aliases", "win rate", "mean reward", "made by")


def models(store: StorePath = "store", as_json: AsJson = False) -> None:
    """List registered models, their versions and aliases; models with an alias first."""
    registry = ModelRegistry(open_store(store))
    document = {}
    rows = []
    for name in sorted(registry.names(), key=lambda name: not registry.aliases(name)):
        versions = registry.versions(name)
        aliases = {}
        for alias, moves in registry.aliases(name).items():
            aliases[alias] = moves[-1].version
        document[name] = {
            "versions": [listed.model_dump(mode="json") for listed in versions],
            "aliases": aliases,
        }
        rows += [_row(version, aliases) for version in versions]
    answer(as_json, document, FittedTable("", _HEADER, rows, left=6))


def _row(version: ModelVersion, aliases: Mapping[str, int]) -> list[str]:
    names = [f"@{alias}" for alias, number in aliases.items() if number == version.version]
    figures = []
    for name in ("win_rate", "mean_reward"):
        value = version.metrics.get(name)
        figures.append("-" if value is None else f"{value:.3f}")
    return [
        version.name,
        str(version.version),
        " ".join(names),
        *figures,
        f"{version.run}, {version.step}",
    ]


def promote(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL:VERSION", help="NAME:VERSION or NAME@ALIAS of the registry."),
    ],
    store: StorePath = "store",
    alias: Annotated[str, typer.Option(help="Alias to move.")] = "production",
) -> None:
    """Move an alias to a version by hand; gates are not asked."""
    registry = ModelRegistry(open_store(store))
    if not re.search("[:@].", model):
        newest = registry.find(f"{model}@{LATEST}")
        raise UserError(f"{model!r} names no version", f"the newest is {model}:{newest.version}")
    version, _ = registry.resolve(model)
    registry.set_alias(version.name, alias, version.version, reason="by hand")
    console.print(f"{version.name}@{alias} is version {version.version}", markup=False)


def export(
    model: Registered,
    folder: NewFolder,
    store: StorePath = "store",
) -> None:
    """Copy a registered checkpoint, with a model card."""
    target = folder.expanduser().absolute()
    version = copy_model(open_store(store), model, target)
    console.print(f"{version.name}:{version.version} is in {target}", markup=False)
