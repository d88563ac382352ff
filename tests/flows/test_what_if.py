"""`geb what-if`: what other settings would change in a finished run, without a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.execution.run_record import RunRecord
from stages.store.base import Artifact, Store
from stages.tables.schemas import PAIRS, read_rows, write_table
from stages.train.what_if import first_step
from stages.training.order import places_of_step
from tests.flows.loop import geb_json, geb_refused


def artifact(store: Path, step: str) -> Artifact:
    record = RunRecord.existing(Store.open(str(store)), "small").step(step)
    assert record is not None
    made = Store.open(str(store)).load(record.stage, record.key)
    assert made is not None
    return made


def asked(store: Path, *settings: str) -> dict[str, Any]:
    return geb_json("what-if", "small", "--store", store, *settings)


def test_the_objective_is_that_of_the_training_s_first_step(finished: Path, tmp_path: Path) -> None:
    store = finished.parent / "store"
    trained, paired = artifact(store, "iteration-1/train"), artifact(store, "iteration-1/pair")
    params = trained.manifest.params
    rows = list(read_rows(paired.file("pairs.parquet"), PAIRS))
    seed, batch = trained.manifest.seed, params["global_batch_pairs"]
    first = [rows[place] for place in places_of_step(len(rows), batch, seed, 0)]
    path = tmp_path / "pairs.parquet"
    write_table(path, PAIRS, first)
    found = first_step({"pairs": [str(path)], "params": params}, {})
    recorded = json.loads(trained.file("metrics.jsonl").read_text().splitlines()[0])
    for name in ("loss", "bonus", "bonus_ratio", "bonus_gradient_share", "nll"):
        assert found[name] == pytest.approx(recorded[name], rel=1e-3, abs=1e-5), name


def test_twice_the_kappa_is_twice_the_bonus_s_gradient_and_nothing_is_computed(
    finished: Path,
) -> None:
    store = finished.parent / "store"
    before = sorted(Store.open(str(store)).artifacts())
    found = asked(store, "--set", "train.kappa=2")
    assert found["changes"] == ["train.kappa 1.0 → 2.0"]
    [only] = found["iterations"]
    own, other = only["figures"]
    assert other["bonus_gradient"] == pytest.approx(2 * own["bonus_gradient"])
    assert other["loss"] == pytest.approx(own["loss"] - own["bonus"])
    assert (only["changed"], only["pairs"][0]) == (0, only["pairs"][1])
    lines = geb_json("plan", finished, "--set", "train.kappa=2")
    assert found["computed"] == sum(line["action"] == "run" for line in lines)
    assert sorted(Store.open(str(store)).artifacts()) == before
    assert "train.kappa 1.0 → 2.0" in (store / "runs/small/what-if.html").read_text()


def test_ties_that_are_dropped_are_pairs_that_change(finished: Path) -> None:
    [only] = asked(finished.parent / "store", "--set", "pair.tie_margin=10")["iterations"]
    assert only["ties"][1] == only["pairs"][1] == only["pairs"][0]
    assert only["changed"] == only["pairs"][0] - only["ties"][0]


def test_a_setting_that_does_not_exist_is_refused(finished: Path) -> None:
    store = finished.parent / "store"
    refused = geb_refused("what-if", "small", "--store", store, "--set", "kappa=2")
    assert "did you mean 'train.kappa'" in refused
