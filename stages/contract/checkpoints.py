"""Files of a checkpoint's folder, checked before a library reads them; faults by the file's name.

No machine-learning library is needed, and no weight is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages.contract.adapters import ADAPTER_CONFIG
from stages.contract.errors import UserError

# One of these is in every checkpoint that has a tokenizer; without the check transformers makes up
# an empty tokenizer from the model's architecture.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_RECORDS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    # transformers looks into it, too.
    "config.json",
)
_INDEX = "model.safetensors.index.json"
_MODEL_RECORDS = ("config.json", "generation_config.json", _INDEX)
# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
WHOLE = "copy or download the checkpoint again, or pass another one"
"""Remedy for a damaged file."""


def check_tokenizer_files(folder: Path) -> None:
    """Checks that a checkpoint has a tokenizer, in files that can be read.

    Raises:
        UserError: It has none, or a file is damaged.
    """
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise UserError(
            f"the checkpoint {folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}",
            "save the tokenizer beside the weights (tokenizer.save_pretrained)",
        )
    for name in _TOKENIZER_RECORDS:
        _read_record(folder / name)


def check_config_files(folder: Path) -> None:
    """Checks the configuration files of a checkpoint.

    Raises:
        UserError: One is missing or damaged.
    """
    if not (folder / "config.json").exists():
        if (folder / ADAPTER_CONFIG).exists():
            raise UserError(
                f"{folder} is a LoRA adapter and no whole checkpoint",
                "merge it into its base with peft (merge_and_unload), save the result with the "
                "tokenizer, and name that folder",
            )
        raise UserError(
            f"{folder} is no checkpoint: it has no config.json",
            "pass a folder written by save_pretrained",
        )
    config, *_ = [_read_record(folder / name) for name in _MODEL_RECORDS]
    if not isinstance((config or {}).get("model_type"), str):
        raise UserError(f"{folder / 'config.json'} names no model_type", WHOLE)


def check_weight_files(folder: Path) -> list[Path]:
    """Checks the headers of a checkpoint's weights against the sizes of their files.

    Returns:
        The files of the weights.

    Raises:
        UserError: There is none, one is damaged, or the index names another.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"the checkpoint {folder} has no weights in safetensors format",
            "save the model with save_pretrained; pickled weights (.bin, .pt) are never loaded",
        )
    for path in files:
        _check_header(path)
    if index := _read_record(folder / _INDEX):
        parts = index.get("weight_map")
        named = parts.values() if isinstance(parts, dict) and parts else [parts]
        # A file elsewhere would be loaded, though the folder's digest does not cover it.
        if lost := set(map(str, named)) - {path.name for path in files}:
            raise UserError(
                f"{folder / _INDEX} names weights that are not in the folder: {min(lost)}", WHOLE
            )
    return files


def _check_header(path: Path) -> None:
    """Compares the size of a safetensors file with what its header lists."""
    try:
        _require_regular(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        wanted, found = 8 + length + max(ends, default=0), path.stat().st_size
        if wanted != found:
            raise ValueError(f"its header asks for {wanted:,} bytes, and it has {found:,}")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no whole safetensors file: {error}", WHOLE) from error


def _read_record(path: Path) -> dict[str, Any] | None:
    """The JSON object that a file holds, or None if there is no such file."""
    try:
        _require_regular(path)
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}", WHOLE) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object: it is a {type(found).__name__}", WHOLE)
    return found


def _require_regular(path: Path) -> None:
    """Refuses a pipe, which a reader would wait for, and a folder."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
