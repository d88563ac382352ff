"""Saving what comes with a model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# How the tokenizer was found, which its library writes down with what it is: the same tokenizer
# would have other bytes, and its checkpoint another digest, on a machine that is offline.
_OF_ITS_LOADING = ("is_local", "local_files_only")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer and its chat template, the same bytes wherever it was loaded."""
    for name in _OF_ITS_LOADING:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
