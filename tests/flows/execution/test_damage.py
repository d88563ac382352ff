"""Damaged artifacts are noticed before use, and a run repairs itself."""

import pytest

from tests.damage import alter, truncate
from tests.flows.loop import geb_json, geb_ok, result_digests, steps

pytestmark = pytest.mark.slow


def artifact_of(store, step):
    record = steps(store)[step]
    return store / "artifacts" / record["stage"] / record["key"]


def test_damage_is_repaired_in_one_run_and_set_aside_until_gc(copied, finished):
    store = copied.parent / "store"
    alter(artifact_of(store, "iteration-1/generate/0") / "responses.parquet")
    truncate(artifact_of(store, "iteration-1/train") / "checkpoint/model.safetensors")
    (artifact_of(store, "iteration-1/score/0") / "scores.parquet").unlink()
    (artifact_of(store, "iteration-1/pair") / "manifest.json").write_text("{")
    done = geb_ok("run", copied)
    for reason in ("has changed", "is missing", "bytes, not", "missing or unreadable"):
        assert reason in done.stdout.replace("\n", " ")
    assert [entry["why"] for entry in geb_json("gc", "--store", store)] == ["set aside"] * 4
    geb_ok("gc", "--store", store, "--delete")
    geb_ok("verify", "--store", store)
    assert list((store / "quarantine").iterdir()) == []
    assert result_digests(store) == result_digests(finished.parent / "store")
