"""Damaged artifacts are noticed before use, and a run repairs itself."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.flows.loop import geb, result_digests, steps, write_config


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A finished run whose store the test may change; modification times are kept."""
    shutil.copytree(finished.parent, tmp_path / "run", copy_function=shutil.copy2)
    return write_config(tmp_path / "run")


def artifact_of(store: Path, step: str) -> Path:
    record = steps(store)[step]
    return store / "artifacts" / record["stage"] / record["key"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_every_kind_of_damage_is_repaired_in_one_run(copied: Path, finished: Path) -> None:
    store = copied.parent / "store"
    alter(artifact_of(store, "iteration-1/generate/0") / "responses.parquet")
    truncate(artifact_of(store, "iteration-1/train") / "checkpoint/model.safetensors")
    (artifact_of(store, "iteration-1/score/0") / "scores.parquet").unlink()
    (artifact_of(store, "iteration-1/pair") / "manifest.json").write_text("{")
    done = geb("run", copied)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("has changed", "is missing", "bytes, not", "missing or unreadable"):
        assert said in done.stdout.replace("\n", " ")
    assert len(list((store / "quarantine").iterdir())) == 4
    assert result_digests(store) == result_digests(finished.parent / "store")


def test_verify_finds_what_a_quick_look_cannot_see(copied: Path) -> None:
    store = copied.parent / "store"
    path = artifact_of(store, "sft") / "checkpoint/model.safetensors"
    before = path.stat()
    alter(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    done = geb("verify", "--store", store, "--json")
    assert done.returncode == 1
    [damaged] = json.loads(done.stdout)["damaged"]
    assert damaged.startswith("sft/")


def test_a_store_that_is_gone_is_a_failure_and_nothing_is_computed(copied: Path) -> None:
    store = copied.parent / "store"
    store.rename(copied.parent / "elsewhere")
    done = geb("resume", "small", "--store", store)
    assert done.returncode == 64
    assert "no store at" in done.stderr
    assert not store.exists()


def test_gc_keeps_what_runs_and_models_need(copied: Path) -> None:
    store = copied.parent / "store"
    alter(artifact_of(store, "iteration-1/pair") / "pairs.parquet")
    assert geb("run", copied).returncode == 0
    listed = json.loads(geb("gc", "--store", store, "--json").stdout)
    assert [each["why"] for each in listed] == ["set aside"]
    assert geb("gc", "--store", store, "--delete").returncode == 0
    assert geb("verify", "--store", store).returncode == 0
    assert json.loads(geb("gc", "--store", store, "--json").stdout) == []
