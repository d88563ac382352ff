"""Sizes of what a run reads: rows of data files, and parameters of models by their config.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flows.pipeline.step import Source
from stages.contract.data_files import count_rows, files_of_folder
from stages.contract.errors import UserError
from stages.contract.request import FileInput, HubInput, Input

_BYTES_PER_TOKEN = 4
PROMPT_TOKENS = 256
"""The usual length of a prompt of UltraFeedback."""
_SHIPPED_CONFIGS = Path(__file__).parent / "models"
_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


class UnknownSizeError(Exception):
    """Reason why parameters or rows cannot be counted."""


def count_parameters(config: Any) -> int:
    """Parameters in the matrices of a dense decoder with gated feed-forward layers.

    ``config`` is the content of a config.json. Norms and biases, some 0.1 %, are left out.

    Raises:
        UnknownSizeError: A field is not a positive number, or the model has experts.
    """
    values = config if isinstance(config, dict) else {}
    sizes = []
    for name in _FIELDS:
        size = values.get(name)
        if not isinstance(size, int) or size < 1:
            raise UnknownSizeError(f"{name} is {size!r}, not a positive number")
        sizes.append(size)
    if any("expert" in name for name in values):
        raise UnknownSizeError("a model with experts is not counted")
    hidden, layers, heads, wide, vocabulary = sizes
    head_width = values.get("head_dim") or hidden // heads
    key_heads = values.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_width * (heads + key_heads)
    tables = 1 if values.get("tie_word_embeddings") else 2
    layer = attention + 3 * hidden * wide
    embeddings = tables * vocabulary * hidden
    return layers * layer + embeddings


def read_parameters(source: Input) -> int:
    """Parameters of a model from outside the run; the local cache has configurations of the hub.

    Raises:
        UnknownSizeError: Its config.json is not here, or cannot be counted.
    """
    try:
        return count_parameters(json.loads(_config_file(source).read_text()))
    except (OSError, ValueError, UnknownSizeError) as error:
        place = getattr(source, "location", None) or getattr(source, "repo", source)
        raise UnknownSizeError(f"the parameters of {place} cannot be counted: {error}") from error


def _config_file(source: Input) -> Path:
    if isinstance(source, FileInput):
        return Path(source.location) / "config.json"
    assert isinstance(source, HubInput)
    # The client takes a while to load.
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source.repo, "config.json", revision=source.revision)
    shipped = _SHIPPED_CONFIGS / f"{source.repo.replace('/', '--')}.json"
    if isinstance(cached, str):
        return Path(cached)
    if shipped.exists():
        return shipped
    raise UnknownSizeError(
        f"run `hf download {source.repo} config.json --revision {source.revision}`"
    )


class DataSize(NamedTuple):
    """Number of rows of data files outside the store, and their mean length in tokens."""

    number: int
    tokens: float


def rows_of(sources: Sequence[Source]) -> DataSize | None:
    """Rows of local data files and folders; None if one of them is elsewhere or no table."""
    number = 0
    tokens = 0.0
    for source in sources:
        if not isinstance(source, FileInput):
            return None
        place = Path(source.location)
        try:
            for file in files_of_folder(place) if place.is_dir() else [place]:
                rows = count_rows(file)
                number += rows
                # The rows of a Parquet file are compressed.
                is_text = file.suffix != ".parquet"
                tokens += (
                    file.stat().st_size / _BYTES_PER_TOKEN if is_text else rows * PROMPT_TOKENS
                )
        except (UserError, OSError):
            # `prepare` reports what is wrong with it.
            return None
    return DataSize(number, tokens / number) if number else None
