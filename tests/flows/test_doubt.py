"""`geb doubt`: a sceptic on a registered model, and a promotion that asks for its verdict."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.doubt import BAD_ANSWERS, bad_answers
from stages.store.base import Store
from stages.store.registry import DoubtCheck, ModelRegistry
from tests.flows.loop import geb, geb_json, geb_ok, geb_refused, steps


def test_ways_to_spoil_an_answer() -> None:
    row = {"response": "Noted, two towels.", "messages": [{"role": "user", "content": "Towels?"}]}
    spoilt = dict(zip(BAD_ANSWERS, bad_answers(row, "Sure."), strict=True))
    assert spoilt["empty"] == ""
    assert spoilt["repeated"] == "Noted, Noted, Noted,"
    assert spoilt["prompt copied"] == "Towels?"
    assert spoilt["very long"].count("two towels") == 10
    assert spoilt["another prompt's answer"] == "Sure."


def test_a_promotion_asks_for_the_doubts_that_were_found(copied: Path, tmp_path: Path) -> None:
    store = copied.parent / "store"
    refused = geb_refused("promote", "small:1", "--doubted", "--store", store)
    assert "small:1 has not been doubted" in refused
    # One prompt that the run has seen, and two that are new.
    prepared = store / "artifacts/prepare" / steps(store)["prepare"]["key"]
    seen = pq.read_table(prepared / "test.parquet")["messages"][0]
    lines = [json.dumps({"messages": seen.as_py()})]
    lines += [json.dumps({"prompt": f"Please bring {n} to room 7."}) for n in ("tea", "towels")]
    prompts = tmp_path / "fresh.jsonl"
    prompts.write_text("\n".join(lines))
    wrong = geb_refused("doubt", "small:1", "--prompts", tmp_path / "none.jsonl", "--store", store)
    assert "none.jsonl" in wrong
    assert not (store / "runs/small-doubt/steps").exists(), "told before anything is sampled"

    found = geb_json("doubt", "small:1", "--prompts", prompts, "--store", store)
    checks = {each["name"]: each for each in found["checks"]}
    assert list(checks) == [
        "another sampling seed",
        "fresh prompts",
        *(f"oracle on bad answers: {name}" for name in BAD_ANSWERS),
        "another training seed",
    ]
    fresh = pq.read_table(store / "runs/small-doubt/fresh.parquet")["messages"].to_pylist()
    assert [each[0]["content"][13:] for each in fresh] == ["tea to room 7.", "towels to room 7."]
    asked, against = (
        pq.read_table(store / f"runs/small-doubt/{each}-answers.parquet")
        for each in ("bad", "honest")
    )
    given, base = (each["response"].to_pylist() for each in (asked, against))
    assert base[3 :: 2 + len(BAD_ANSWERS)] == given[1 :: 2 + len(BAD_ANSWERS)]
    # A model that is its base again gains nothing, whatever the seed.
    assert checks["another sampling seed"]["passed"] is False
    assert checks["another training seed"]["passed"] is None
    assert "mean score 0.000" in checks["oracle on bad answers: empty"]["finding"]
    assert f"small:1 {found['verdict']}" in (store / "runs/small-doubt/doubt.html").read_text()

    refused = geb_refused("promote", "small:1", "--doubted", "--store", store)
    assert "against it: another sampling seed" in refused
    listed = geb_json("models", "--store", store)
    assert listed["small"]["doubts"]["1"]["checks"] == found["checks"]
    geb_ok("export", "small:1", tmp_path / "taken", "--store", store)
    assert found["verdict"] in (tmp_path / "taken/README.md").read_text()

    # A run of `geb sweep --seeds`, which moves no alias.
    shutil.copytree(store / "runs/small", store / "runs/small-s1")
    record = store / "runs/small-s1/config.json"
    config = json.loads(record.read_text())
    config |= {"name": "small-s1", "seed": 1, "promote": config["promote"] | {"aliases": []}}
    record.write_text(json.dumps(config))
    prompts.write_text(lines[0])
    told = geb("doubt", "small:1", "--prompts", prompts, "--store", store)
    assert f"the run has seen all of {prompts}" in told.stdout.replace("\n", "")
    assert "of 1 gained" in told.stdout
    for each in (store / "runs/small/config.json", record):
        each.write_text(json.dumps(json.loads(each.read_text()) | {"iterations": 2}))
    told = geb("doubt", "small:1", "--store", store)
    assert "no ended run of these settings" in " ".join(told.stdout.split()), "a half-done run"


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (None, 0), (False, 64)])
def test_checks_that_were_not_made_hold_no_model_back(
    copied: Path, passed: bool | None, code: int
) -> None:
    store = copied.parent / "store"
    registry = ModelRegistry(Store.open(str(store)))
    checks = [DoubtCheck(name="seed", passed=True, finding="")]
    checks.append(DoubtCheck(name="other", passed=passed, finding=""))
    found = registry.record_doubt("small", 1, checks)
    verdicts = {True: "survived 2 of 2", None: "survived 1 of 1", False: "survived 1 of 2"}
    assert found.verdict() == verdicts[passed]
    promoted = geb("promote", "small:1", "--doubted", "--alias", "trusted", "--store", store)
    assert promoted.returncode == code, promoted.stderr
