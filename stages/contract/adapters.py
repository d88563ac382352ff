"""LoRA adapters as models: a folder in peft's format, and the base that it goes over.

A stage that reads a model has an input for the whole checkpoint (`policy`) and an optional one for
an adapter on it (`adapter`; of another model `<name>_adapter`). The folder that a training writes
names its base by digest, and a request that puts it on another base is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from stages.contract.errors import UserError
from stages.contract.records import read_record
from stages.contract.request import Input

if TYPE_CHECKING:
    from stages.contract.manifest import Manifest

ADAPTER_CONFIG = "adapter_config.json"
BASE_FILE = "base.json"
"""File next to the adapter's: the digest of its base, as requests give it."""
_INPUT: TypeAdapter[Input] = TypeAdapter(Input)


def adapter_input(model: str) -> str:
    """Name of the input for a model's adapter: `adapter` of `policy`, else `<model>_adapter`."""
    return "adapter" if model == "policy" else f"{model}_adapter"


def write_base(folder: Path, base: Input) -> None:
    """Writes into an adapter's folder which base it goes over.

    By its digest alone: the same training then gives the same bytes wherever the base lies.
    """
    (folder / BASE_FILE).write_text(json.dumps({"digest": base.digest}, indent=2) + "\n")


def check_adapter(folder: Path, base: Input) -> None:
    """Checks that a folder is an adapter, and for this base if it names one; UserError if not."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder} is no LoRA adapter: it has no {ADAPTER_CONFIG}",
            "name a folder written by peft's save_pretrained",
        )
    path = folder / BASE_FILE
    if path.exists():
        digest = read_record(path, dict[str, str], "copy the adapter again").get("digest")
        if digest != base.digest:
            raise UserError(
                f"the adapter {folder} goes over the base with the digest {digest}, and is given "
                f"one with {base.digest}",
                "give the base that the adapter was trained over",
            )


def base_of_adapter(manifest: Manifest, path: str) -> Input | None:
    """The base of the adapter that an artifact has at `path`; None if a whole model is there.

    An adapter's training reads the base as its `policy`, so that whatever needs an artifact's
    inputs (garbage collection, model cards) needs the base of its adapter.
    """
    if not manifest.files_at(f"{path}/{BASE_FILE}"):
        return None
    (given,) = manifest.inputs["policy"]
    if given["kind"] == "hub":
        given = {name: value for name, value in given.items() if name != "digest"}
    return _INPUT.validate_python(given)
