"""Inputs from outside the store, on hosts that do not have them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.external import resolve
from flows.runners.local.bucket_inputs import upload_inputs
from stages.contract.context import StageContext
from stages.contract.errors import UserError
from tests.flows.bucket_sync.hosts import Host
from tests.stage_calls import file_input


def read_input(context: StageContext[Any]) -> None:
    """Keeps what the files of its input hold."""
    place = context.path("parts")
    files = [place] if place.is_file() else sorted(place.iterdir())
    held = [f"{each.name}: {each.read_text()}" for each in files]
    (context.out / "read").write_text("; ".join(held))


@pytest.mark.parametrize("change", ["removed", "another file"])
def test_files_from_outside_are_offered_to_other_hosts(
    near: Host, far: Host, tmp_path: Path, change: str
):
    path = tmp_path / "prompts.jsonl"
    path.write_text("prompt")
    source = file_input(path)
    os.environ["GEB_CACHE"] = str(near.store.root.parent)
    upload_inputs(near.request("read", source))
    upload_inputs(near.request("read", source))
    path.unlink()
    if change == "another file":
        path.write_text("PROMPT")
    far.body = read_input
    assert far.make("read", source).file("read").read_text() == "prompts.jsonl: prompt"


def test_a_folder_from_outside_is_offered_whole(near: Host, far: Host, tmp_path: Path):
    folder = tmp_path / "model"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache/index").write_text("hidden")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    source = resolve(str(folder), "model")
    os.environ["GEB_CACHE"] = str(near.store.root.parent)
    upload_inputs(near.request("read", source))
    folder.rename(tmp_path / "elsewhere")
    far.body = read_input
    read = far.make("read", source).file("read").read_text()
    assert read == "config.json: {}; tokenizer.json: {}"


def test_a_file_that_is_nowhere_is_a_persons_mistake(far: Host, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("prompt")
    source = file_input(path)
    path.unlink()
    with pytest.raises(UserError, match=r"prompts\.jsonl is not on"):
        far.make("read", source)


def test_a_file_that_changed_is_not_offered(near: Host, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("prompt")
    source = file_input(path)
    path.write_text("another")
    os.environ["GEB_CACHE"] = str(near.store.root.parent)
    with pytest.raises(UserError, match="has changed since"):
        upload_inputs(near.request("read", source))
