"""Commands of registered models, ``geb models`` to ``geb chat``; and ``geb dataset``."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.commands.common import AsJson, Registered, RunName, StorePath, answer, console
from flows.execution.run_record import RunRecord
from flows.report.hub_push import push as push_to_hub
from flows.report.hub_push import require_token
from flows.report.model_card import ADAPTER, base_of, place_of
from flows.report.model_card import export as export_to
from flows.report.table import FittedTable, formatted, interval_text
from stages.contract.adapters import base_of_adapter
from stages.contract.errors import EXIT_USER, GebError, UserError
from stages.store.base import Store
from stages.store.opening import open_store
from stages.store.registry import LATEST, ModelRegistry, ModelVersion
from stages.store.registry import Alias as AliasState

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
_HEADER = ("model", "version", "aliases", "win rate", "mean reward", "made by")
Alias = Annotated[str, typer.Option("--alias", help="Alias to move.")]


def models(store: StorePath = "store", as_json: AsJson = False) -> None:
    """List registered models, their versions and aliases."""
    registry = ModelRegistry(open_store(store))
    document, rows = {}, []
    for name in registry.names():
        versions, aliases = registry.versions(name), registry.aliases(name)
        document[name] = {
            "versions": [each.model_dump(mode="json") for each in versions],
            "aliases": {each.alias: each.version for each in aliases},
        }
        rows += [_row(each, aliases, newest=each is versions[-1]) for each in versions]
    answer(as_json, document, FittedTable("", _HEADER, rows, kept=3, left=6))


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
    """The rate with its 95 % interval, if the registered metrics tell of how many prompts."""
    rate, prompts = metrics.get("win_rate"), metrics.get("compared_prompts")
    if rate is None or not prompts:
        return formatted(rate, ".3f")
    from flows.report.statistics import proportion

    interval = proportion(round(rate * prompts), prompts).interval
    return f"{rate:.3f}\n{interval_text(interval, '.3f')}"


def promote(
    model: Registered,
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


def export(
    model: Registered,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; new, or empty.")],
    store: StorePath = "store",
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Also upload it to this repository of the hub, with the token in HF_TOKEN. The "
            "same command goes on with an upload that was cut off.",
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    private: Annotated[bool, typer.Option(help="Make the repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be pushed; copy and send nothing.")
    ] = False,
) -> None:
    """Copy a registered checkpoint or adapter, with a model card: lineage, figures, licence."""
    if not push and (revision or private or dry_run):
        raise UserError(
            "--revision, --private and --dry-run are about a push, and --push is not given",
            "add --push OWNER/NAME",
        )
    target, opened = folder.expanduser().absolute(), open_store(store)
    if push and dry_run:
        _print_files(opened, model, f"{push}{f'@{revision}' if revision else ''}")
        return
    if push:
        require_token()
    version = export_to(opened, model, target, again=push is not None)
    name = f"{version.name}:{version.version}"
    console.print(f"{name} is in {target}", markup=False)
    console.print(f"model card {target / 'README.md'}", markup=False)
    if push:
        url = push_to_hub(target, push, revision=revision, private=private, message=name)
        console.print(f"pushed {url}", markup=False)


def _print_files(store: Store, model: str, place: str) -> None:
    """Prints the files of a registered model and their sizes."""
    version, artifact = ModelRegistry(store).resolve(model)
    checkpoint = version.checkpoint.path
    files = artifact.manifest.files_at(checkpoint)
    # As they lie in the copy: the checkpoint at its root, adapters beside it in their folder.
    named = {path.removeprefix(f"{checkpoint}/"): each.size for path, each in files.items()}
    if checkpoint != ADAPTER:
        found = artifact.manifest.files_at(ADAPTER)
        named |= {path: each.size for path, each in found.items()}
    for path, size in sorted(named.items()):
        console.print(f"{size:>15,}  {path}", markup=False)
    total = sum(named.values())
    console.print(
        f"{len(named)} files of {total:,} bytes and a model card would go to {place}", markup=False
    )


def dataset(
    name: RunName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; new, or empty.")],
    store: StorePath = "store",
) -> None:
    """Write a run's responses, scores and pairs as a data set for TRL, with a card."""
    from flows.report.dataset import export as export_dataset

    target = folder.expanduser().absolute()
    counts = export_dataset(RunRecord.existing(open_store(store), name), target)
    rows = ", ".join(f"{number} {table}" for table, number in counts.items())
    console.print(f"{rows} of {name} are in {target}", markup=False)
    console.print(f"next: datasets.load_dataset({str(target)!r}, 'pairs')", markup=False)


def chat(
    model: Registered,
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
