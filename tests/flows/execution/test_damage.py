"""Damaged artifacts are noticed before use, and a run repairs itself."""

import pytest

from tests.damage import alter, truncate
from tests.flows.loop import geb, geb_json, geb_ok, result_digests, steps

pytestmark = pytest.mark.slow


def artifact_of(store, step):
    record = steps(store)[step]
    return store / "artifacts" / record["stage"] / record["key"]


def test_every_kind_of_damage_is_repaired_in_one_run(copied, finished):
    store = copied.parent / "store"
    alter(artifact_of(store, "iteration-1/generate/0") / "responses.parquet")
    truncate(artifact_of(store, "iteration-1/train") / "checkpoint/model.safetensors")
    (artifact_of(store, "iteration-1/score/0") / "scores.parquet").unlink()
    (artifact_of(store, "iteration-1/pair") / "manifest.json").write_text("{")
    done = geb_ok("run", copied)
    for reason in ("has changed", "is missing", "bytes, not", "missing or unreadable"):
        assert reason in done.stdout.replace("\n", " ")
    assert len(list((store / "quarantine").iterdir())) == 4
    assert result_digests(store) == result_digests(finished.parent / "store")


def test_gc_keeps_what_runs_and_models_need(copied):
    store = copied.parent / "store"
    alter(artifact_of(store, "iteration-1/pair") / "pairs.parquet")
    assert geb("run", copied).returncode == 0
    listed = geb_json("gc", "--store", store)
    assert [entry["why"] for entry in listed] == ["set aside"]
    assert geb("gc", "--store", store, "--delete").returncode == 0
    assert geb("verify", "--store", store).returncode == 0
    assert geb_json("gc", "--store", store) == []
