"""`geb export` and `geb chat`: a registered model, used."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from flows.report.exported import base_of
from stages.contract.local_store import LocalStore
from stages.contract.manifest import Manifest
from stages.contract.request import HubInput
from tests.flows.loop import geb, steps
from tests.forking import forked_python


def test_an_exported_model_is_the_checkpoint_with_its_card(finished: Path, tmp_path: Path) -> None:
    store = finished.parent / "store"
    done = geb("export", "small@production", tmp_path / "model", "--store", store)
    assert done.returncode == 0, done.stderr
    key = steps(store)["iteration-1/train"]["key"]
    checkpoint = store / "artifacts/train" / key / "checkpoint"
    for path in checkpoint.iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()
    card = (tmp_path / "model/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "base_model" not in card, "the base is no model of the hub"
    for said in ("trained from scratch", "| mean reward |", "| win rate over", f"train {key[:12]}"):
        assert said in card
    for step in ("prepare", "sft", "iteration-1/generate/0", "iteration-1/score/0"):
        assert f"| small, {step} |" in card, "lineage"
    again = geb("export", "small:1", tmp_path / "model", "--store", store)
    assert again.returncode == 64
    assert "is there and not empty" in again.stderr


def test_a_chat_shows_the_base_beside_the_policy(finished: Path) -> None:
    done = subprocess.run(
        [
            *(forked_python(), "-m", "flows.commands.cli", "chat", "small@production"),
            *("--store", finished.parent / "store", "--max-new-tokens", "4"),
        ],
        input="Please bring two cups to room 12.\n\nWe need two maps.\n",
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert names == ["small", "base"] * 2


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "me@home").mkdir()
    done = subprocess.run(
        [forked_python(), "-m", "stages.generate.dialogue", f"base={tmp_path / 'me@home'}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 64
    assert f"{tmp_path}/me@home" in done.stderr, "an @ in a folder's name begins no revision"
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_base_of_the_hub_is_its_repository_at_its_revision(tmp_path: Path) -> None:
    store = LocalStore.open(str(tmp_path), create=True)
    hub = HubInput(repo="owner/model", revision="c0ffee")
    manifest = Manifest(
        stage="train",
        version="1",
        key="0" * 64,
        params={},
        seed=0,
        inputs={"policy": [hub.model_dump(mode="json") | {"digest": hub.digest}]},
        run="hub",
        step="iteration-1/train",
        files={},
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:00:01+00:00",
        software={},
        host="here",
        accelerator="cpu",
        notes={},
    )
    artifact = store.publish(store.new_scratch("train", manifest.key), manifest)
    found = base_of(store, artifact)
    assert (found.name, found.revision, found.folder) == ("owner/model", "c0ffee", None)


def test_a_model_that_is_not_there_is_named(finished: Path, tmp_path: Path) -> None:
    for command in (["export", "nobody@production", tmp_path / "model"], ["chat", "nobody"]):
        done = geb(*command, "--store", finished.parent / "store")
        assert done.returncode == 64
        assert "nobody" in done.stderr
        assert "small" in done.stderr, "those that there are"
