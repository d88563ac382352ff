"""Inputs from outside: hashed once in a block, again where a file has changed."""

from __future__ import annotations

import os
from pathlib import Path

from flows.pipeline.inputs import inputs_resolved_once, resolve


def rewrite(path: Path, text: str, modified: int) -> None:
    """Other bytes of the same length, in the same file, with a time of modification."""
    path.write_text(text)
    os.utime(path, ns=(modified, modified))


def test_a_file_is_read_once_in_a_block_and_again_where_it_was_changed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    weights = checkpoint / "model.safetensors"
    rewrite(weights, "old", 1)
    with inputs_resolved_once():
        first = resolve(str(checkpoint), "model")
        rewrite(weights, "new", 1)
        assert resolve(str(checkpoint), "model") == first, "it was read again"
        with inputs_resolved_once():
            assert resolve(str(checkpoint), "model") == first, "an inner block reads again"
        rewrite(weights, "new", 2)
        changed = resolve(str(checkpoint), "model")
    assert changed.digest != first.digest
    rewrite(weights, "old", 2)
    assert resolve(str(checkpoint), "model") == first, "outside of a block nothing is remembered"
