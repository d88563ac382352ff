"""Preferences from outside to a trained model, and a run's pairs into TRL."""

import json

import datasets
import pytest

from stages.store.opening import open_store
from stages.tables.schemas import RESPONSES, read_rows
from tests.flows.loop import ROOT, geb_ok, steps, write_config
from tests.stage_calls import write_jsonl


@pytest.fixture
def preferences(tmp_path):
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


@pytest.mark.slow
def test_trl_trains_on_the_pairs_of_a_run_on_preferences(tmp_path, preferences, prefect_server):
    from trl import DPOConfig, DPOTrainer

    config = write_config(
        tmp_path,
        inputs={"prompts": [], "preferences": str(preferences)},
        prepare={"prompts_per_iteration": None},
    )
    geb_ok("run", config)
    pairs = pairs_of_run(tmp_path / "store", "preferences")
    assert len(pairs) == 160 - 16
    rows = [json.loads(line) for line in preferences.read_text().splitlines()]
    assert {name: pairs[0][name] for name in rows[0]} in rows

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


def test_pairs_of_samples_are_a_data_set_of_preferences(finished):
    store = finished.parent / "store"
    pairs = pairs_of_run(store, "pair").filter(lambda row: not row["tie"])
    artifact = open_store(str(store)).load(
        "generate", steps(store, "small")["iteration-1/generate/0"]["key"]
    )
    responses = {
        (row["prompt_id"], row["sample_index"]): row
        for row in read_rows(artifact.file("responses.parquet"), RESPONSES)
    }
    assert len(pairs) > 0
    for pair in pairs:
        for side in ("chosen", "rejected"):
            response = responses[pair["prompt_id"], pair[f"{side}_sample_index"]]
            assert pair["prompt"] == response["messages"]
            assert pair[side] == [{"role": "assistant", "content": response["response"]}]


def pairs_of_run(store, stage):
    """The first iteration's table of pairs, by the library that TRL reads with."""
    key = steps(store, "small")["iteration-1/pair"]["key"]
    path = store / f"artifacts/{stage}/{key}/pairs.parquet"
    cache = str(store.parent / "cache")
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=cache)
