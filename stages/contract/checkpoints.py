"""Files of a checkpoint's folder, checked before a library reads them.

No machine-learning library is needed, and no weight is read. Whatever is missing or damaged raises
a ``UserError`` that names the file.
"""

import json
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError
from stages.contract.records import read_record

# One of these is in every checkpoint that has a tokenizer; without the check transformers makes up
# an empty tokenizer from the model's architecture.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER_RECORDS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    # transformers looks into it, too.
    "config.json",
)
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_MODEL_RECORDS = ("config.json", "generation_config.json", _INDEX)
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
# Ten times the longest context that a model is published with.
_LARGEST_SIZE = 10**8
# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
_WHOLE = "copy or download the checkpoint again, or pass another one"


def check_checkpoint(folder: Path) -> None:
    """Checks all files of a checkpoint as far as its stages do before they load it."""
    check_config_files(folder)
    check_weight_files(folder)
    check_tokenizer_files(folder)


def check_tokenizer_files(folder: Path) -> None:
    """Checks that a checkpoint has a tokenizer, in files that can be read."""
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise UserError(
            f"the checkpoint {folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}",
            "save the tokenizer in the folder of the weights (tokenizer.save_pretrained)",
        )
    for name in _TOKENIZER_RECORDS:
        read_settings(folder / name)


def check_config_files(folder: Path) -> None:
    """Checks the configuration files of a checkpoint."""
    if (folder / _ADAPTER).exists():
        # Beside a whole checkpoint, too: transformers would load its base in the place of that.
        raise UserError(
            f"{folder} is a LoRA adapter and no whole checkpoint: it has {_ADAPTER}",
            "merge it into its base with peft (merge_and_unload), save the result with the "
            "tokenizer, and name that folder",
        )
    if not (folder / "config.json").exists():
        raise UserError(
            f"{folder} is not a checkpoint: it has no config.json",
            "pass a folder written by save_pretrained",
        )
    config, *_ = [read_settings(folder / name) for name in _MODEL_RECORDS]
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'} names no model_type", _WHOLE)
    for name in _SIZES:
        size = config.get(name)
        if isinstance(size, int) and not 0 < size <= _LARGEST_SIZE:
            raise UserError(f"{folder / 'config.json'}: {name} is {size}", _WHOLE)


def check_weight_files(folder: Path) -> None:
    """Checks the headers of a checkpoint's weights against files and index."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"the checkpoint {folder} has no weights in safetensors format",
            "save the model with save_pretrained; pickled weights (.bin, .pt) are never loaded",
        )
    for path in files:
        _check_header(path)
    if index := read_settings(folder / _INDEX):
        parts = index.get("weight_map")
        named = parts.values() if isinstance(parts, dict) and parts else [parts]
        # A file elsewhere would be loaded, though the folder's digest does not cover it.
        if lost := set(map(str, named)) - {path.name for path in files}:
            raise UserError(
                f"{folder / _INDEX} names weights that are not in the folder: {min(lost)}", _WHOLE
            )


def read_settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; an empty one without the file."""
    try:
        return read_record(path, dict[str, Any], _WHOLE)
    except FileNotFoundError:
        return {}


def _check_header(path: Path) -> None:
    """Checks that the header of a safetensors file fits the file's size."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
        listed = [tensor for name, tensor in header.items() if name != "__metadata__"]
        expected = 8 + length + max((tensor["data_offsets"][1] for tensor in listed), default=0)
        if expected != (size := path.stat().st_size):
            raise ValueError(f"its header asks for {expected:,} bytes, and it has {size:,}")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}", _WHOLE) from error
