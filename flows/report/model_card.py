"""A registered model for use elsewhere: its files, and a model card that says how it was made."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from flows.report.files import new_folder, render, write_file
from flows.report.lineage import lineage_of
from stages.contract.adapters import base_of_adapter
from stages.contract.errors import UserError
from stages.contract.request import ArtifactInput, FileInput, HubInput
from stages.store.base import Artifact, Store
from stages.store.registry import ModelRegistry, ModelVersion

ADAPTER = "adapter"
"""Folder of adapters, in an artifact and in a copy."""
_CARD = "README.md"
_FIGURES = (
    ("mean reward", "mean_reward"),
    ("mean reward of the base", "base_mean_reward"),
    ("win rate over the base, ties lost", "win_rate"),
    ("held-out prompts compared", "compared_prompts"),
    ("of these tied", "tied_prompts"),
)
_LICENCE = re.compile(r"^license:\s*(\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class BaseModel:
    """The model that a training started from.

    Attributes:
        name: Hub id, a folder, or the artifact of a warm start.
        licence: Licence that its model card names, in a folder; None if none is known.
        folder: Its checkpoint, a folder; None for one of the hub.
        revision: Commit of the hub's repository; empty for a folder.
        is_own: Whether a warm start made it from nothing.
    """

    name: str
    licence: str | None = None
    folder: Path | None = None
    revision: str = ""
    is_own: bool = False


def export(store: Store, model: str, folder: Path, *, again: bool = False) -> ModelVersion:
    """Copies a registered checkpoint into a new folder and writes its model card.

    Adapters stay adapters: those that are registered in a checkpoint's place, with a card that
    names their base, and those that were saved beside one, in the folder `adapter` with a card of
    its own. With ``again``, the folder may hold a copy of the same version, with the same card.

    Raises:
        UserError: There is no such model, the folder holds something, or the disk is full.
    """
    version, artifact = ModelRegistry(store).resolve(model)
    source = artifact.file(version.checkpoint.path)
    # First, so that a card which cannot be made leaves no folder.
    has_adapter = bool(artifact.manifest.files_at(ADAPTER))
    is_adapter = base_of_adapter(artifact.manifest, version.checkpoint.path) is not None
    trained = has_adapter or is_adapter
    adapter_base = _adapter_base(store, version, artifact) if trained else None
    has_bonus = artifact.manifest.params.get("design", "none") != "none"
    values = {"version": version, "adapter_base": adapter_base, "has_bonus": has_bonus}
    card = render(
        "model_card.md.jinja",
        **values,
        base=base_of(store, artifact),
        is_adapter=is_adapter,
        figures=[
            (title, str(value) if isinstance(value, int) else f"{value:.4g}")
            for title, name in _FIGURES
            if (value := version.metrics.get(name)) is not None
        ],
        made=artifact.manifest,
        ancestors=lineage_of(store, artifact.manifest.stage, artifact.manifest.key),
        digest=version.checkpoint.digest,
    )
    # The card is written last: where it is, the copy is whole.
    if again and (folder / _CARD).is_file() and (folder / _CARD).read_text("utf-8") == card:
        return version
    with new_folder(folder):
        _copy(source, folder)
        if has_adapter:
            _copy(artifact.file(ADAPTER), folder / ADAPTER)
            write_file(folder / ADAPTER / _CARD, render("adapter_card.md.jinja", **values))
        write_file(folder / _CARD, card)
    return version


def _copy(source: Path, folder: Path) -> None:
    """Copies a folder, file by file: each failure is its own, with its place."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in source.iterdir():
        if each.is_dir():
            _copy(each, folder / each.name)
        else:
            shutil.copy2(each, folder / each.name)


def place_of(store: Store, source: ArtifactInput | FileInput | HubInput) -> str:
    """Folder of a model, UserError if it is gone; or its repository of the hub as `ID@REVISION`."""
    if isinstance(source, HubInput):
        return f"{source.repo}@{source.revision}"
    if isinstance(source, FileInput):
        return source.location
    made = store.load(source.stage, source.key)
    if made is None:
        raise UserError(
            f"the base {source.stage} {source.key[:12]} is no longer in the store",
            "resume the run that made it, which makes it again",
        )
    return str(made.file(source.path))


def base_of(store: Store, artifact: Artifact) -> BaseModel:
    """The model that a trained checkpoint started from, by its lineage."""
    ancestors = lineage_of(store, artifact.manifest.stage, artifact.manifest.key)
    # The warm start, if there is one, or the first policy: nothing is trained before it.
    first = [each for each in ancestors if each.stage in ("train", "sft")][-1]
    given = [source for source in first.inputs.get("policy", ()) if not source.is_artifact]
    if first.stage == "sft":
        made = store.load("sft", first.key)
        name = f"sft {first.key[:12]} ({first.made_by})"
        name += f", warm-started from {given[0].title()}" if given else ", trained from scratch"
        licence = _licence(Path(given[0].name)) if given else None
        if made is None:
            raise UserError(
                f"the warm start {first.key[:12]} is no longer in the store",
                f"resume the run {artifact.manifest.run!r}, which makes it again",
            )
        return BaseModel(name, licence, made.file("checkpoint"), is_own=not given)
    if not given:
        raise UserError(
            f"the first policy of {artifact.manifest.run} is not in the lineage of its checkpoint",
            "`geb lineage` shows what is",
        )
    if given[0].revision:
        return BaseModel(given[0].name, revision=given[0].revision)
    place = Path(given[0].name)
    return BaseModel(given[0].name, _licence(place), place)


def _adapter_base(store: Store, version: ModelVersion, artifact: Artifact) -> dict[str, str]:
    """The model that an iteration's training started from: in words, and its place on the hub."""
    (given,) = artifact.manifest.inputs["policy"]
    if given["kind"] == "hub":
        return {**given, "name": f"{given['repo']}, revision {given['revision']}"}
    if given["kind"] == "file":
        return {"name": f"{given['location']} (digest {given['digest']})", "repo": ""}
    said = f"the `{given['path']}` of {given['stage']} {given['key']}"
    for each in ModelRegistry(store).versions(version.name):
        if (each.checkpoint.key, each.checkpoint.path) == (given["key"], given["path"]):
            said = f"{each.name}, version {each.version} ({said})"
    return {"name": said, "repo": ""}


def _licence(folder: Path) -> str | None:
    """The licence that a checkpoint's model card names."""
    try:
        found = _LICENCE.search((folder / _CARD).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return found.group(1) if found else None
