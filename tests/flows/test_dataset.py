"""Preferences from outside to a trained model, and a run's data out of it, into TRL."""

import json
from pathlib import Path

import pytest

from flows.pipeline.algorithm import all_steps, step_names
from flows.pipeline.loading import load_config
from stages.contract.errors import UserError
from stages.store.opening import open_store
from stages.tables.schemas import PAIRS, num_rows, read_rows
from tests.flows.loop import ROOT, geb, geb_ok, inputs, steps, write_config
from tests.stage_calls import write_jsonl


@pytest.fixture
def preferences(tmp_path: Path) -> Path:
    """160 preferences for the quickstart's prompts, in TRL's conversational format."""
    lines = (ROOT / "data/quickstart/prompts.jsonl").read_text().splitlines()[:160]
    rows = (
        {
            "prompt": row["messages"],
            "chosen": [{"role": "assistant", "content": f"Gladly, {row['reference_answer']}."}],
            "rejected": [{"role": "assistant", "content": row["reference_answer"]}],
        }
        for row in map(json.loads, lines)
    )
    return write_jsonl(tmp_path / "preferences.jsonl", rows)


def test_preferences_take_the_place_of_samples_and_name_the_prompts(
    tmp_path: Path, preferences: Path
) -> None:
    places = {"prompts": [], "preferences": str(preferences)}
    config = load_config(write_config(tmp_path, inputs=places, iterations=2))
    assert config.inputs.prompts == (str(preferences),)
    names = step_names(config)
    assert not [name for name in names if name.startswith(("iteration-1/gen", "iteration-1/sc"))]
    paired = [each for each in all_steps(config) if each.stage == "preferences"]
    assert [each.name for each in paired] == ["iteration-1/pair", "iteration-2/pair"]
    # One tokenizer, the base's: another policy does not make the pairs anew.
    assert inputs(paired[1])["policy"] == inputs(paired[0])["policy"] == ["sft:checkpoint"]
    assert inputs(paired[1])["prompts"] == ["prepare:iteration-2.parquet"]
    sampler = {"reference_logprobs": "sampler"}
    with pytest.raises(UserError, match=r"inputs\.preferences names pairs that no policy"):
        load_config(write_config(tmp_path, inputs=places, train=sampler))


@pytest.mark.slow
def test_preferences_train_a_model_whose_data_trl_trains_on(
    tmp_path: Path, preferences: Path, prefect_server: str
) -> None:
    import datasets
    from trl import DPOConfig, DPOTrainer

    config = write_config(
        tmp_path,
        inputs={"prompts": [], "preferences": str(preferences)},
        prepare={"prompts_per_iteration": None},
    )
    geb_ok("run", config)
    table = open_store(str(tmp_path / "store")).load(
        "preferences", steps(tmp_path / "store", "small")["iteration-1/pair"]["key"]
    )
    assert table is not None
    assert num_rows(table.file("pairs.parquet")) == 160 - 16

    folder = tmp_path / "data-set"
    geb_ok("dataset", "small", folder, "--store", tmp_path / "store")
    pairs = datasets.load_dataset(str(folder), "pairs", split="train", cache_dir=str(tmp_path))
    assert len(pairs) == 144
    given = [json.loads(line) for line in preferences.read_text().splitlines()]
    assert {name: pairs[0][name] for name in given[0]} in given
    assert geb("dataset", "small", folder, "--store", tmp_path / "store").returncode == 64

    policy = str(next((tmp_path / "store/artifacts/sft").iterdir()) / "checkpoint")
    trainer = DPOTrainer(
        policy,
        args=DPOConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=2,
            per_device_train_batch_size=4,
            report_to="none",
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
        train_dataset=pairs,
    )
    assert trainer.train().training_loss > 0


def test_a_sampled_run_is_written_with_its_responses_and_read_back(
    finished: Path, tmp_path: Path
) -> None:
    import datasets

    store = finished.parent / "store"
    folder = tmp_path / "data-set"
    geb_ok("dataset", "small", folder, "--store", store)
    tables = {
        name: datasets.load_dataset(str(folder), name, split="train", cache_dir=str(tmp_path))
        for name in ("pairs", "responses")
    }
    opened = open_store(str(store))
    pair = opened.load("pair", steps(store, "small")["iteration-1/pair"]["key"])
    assert pair is not None
    kept = [row for row in read_rows(pair.file("pairs.parquet"), PAIRS) if not row["tie"]]
    assert [row["chosen"][0]["content"] for row in tables["pairs"]] == [
        row["chosen_response"] for row in kept
    ]
    responses = tables["responses"]
    assert len(responses) == 2 * 48
    assert set(json.loads(responses[0]["components"])) == {"gladly", "order_right"}
    by_place = {(row["prompt_id"], row["sample_index"]): row for row in responses}
    first = kept[0]
    mine = by_place[first["prompt_id"], first["chosen_sample_index"]]
    assert (mine["response"], mine["score"]) == (first["chosen_response"], first["chosen_score"])
    assert mine["logprob"] == pytest.approx(sum(first["chosen_logprobs"]), rel=1e-5)
