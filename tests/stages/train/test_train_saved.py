"""Weights that a training writes: names, dtypes, merged adapters, the average reference."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.contract.errors import DamagedArtifactError
from stages.modeling import save
from stages.store.base import Store
from tests.stages.train.checkpoints import assert_same_logprobs, first_logprob, weights_of
from tests.stages.train.train_helpers import train
from tests.tiny_models import make_tiny_llama


def test_the_checkpoint_is_an_ordinary_one(trained, policy):
    checkpoint = trained.artifact.path / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(policy).chat_template
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.use_cache
    assert model.config.dtype == torch.float32
    assert (checkpoint / "generation_config.json").exists()
    assert str(policy) not in (checkpoint / "config.json").read_text()
    assert weights_of(trained).keys() == load_file(policy / "model.safetensors").keys()


def test_an_average_reference_is_written(tmp_path, policy, other, pairs):
    # Weights of 16 bits would not notice most of an average's steps.
    average = {"reference_kind": "ema", "ema_decay": 0.75, "save_dtype": "bfloat16"}
    found = train(tmp_path / "store", policy, [pairs], reference=other, **average)
    old, new = load_file(other / "model.safetensors"), weights_of(found)
    written = load_file(found.artifact.path / "ema" / "model.safetensors")
    for name, weight in written.items():
        torch.testing.assert_close(weight, 0.75 * old[name] + 0.25 * new[name].float())
    AutoTokenizer.from_pretrained(found.artifact.path / "ema")


def test_lora_saves_merged_weights(tmp_path, policy, pairs):
    found = train(tmp_path / "store", policy, [pairs], lora={"rank": 4, "alpha": 8.0})
    start, end = load_file(policy / "model.safetensors"), weights_of(found)
    assert start.keys() == end.keys()
    changed = {name for name in end if not torch.equal(start[name], end[name])}
    assert changed == {name for name in end if "_proj" in name}
    assert found.records[-1]["preference_loss"] < found.records[0]["preference_loss"]
    # The merged checkpoint is what was trained: its log-ratios go on where training ended.
    on = {"reference": policy, "epochs": 1, "learning_rate": 1e-9}
    again = train(tmp_path / "again", found.artifact.path / "checkpoint", [pairs], **on)
    assert again.records[0]["margin"] > 1.0


def test_adapters_beside_the_checkpoint_are_the_same_policy(tmp_path, policy, pairs):
    lora = {"rank": 4, "alpha": 8.0}
    merged = train(tmp_path / "store", policy, [pairs], lora=lora)
    both = train(tmp_path / "store", policy, [pairs], lora=lora | {"save": "both"})
    assert both.weights == merged.weights
    assert not merged.artifact.manifest.files_at("adapter")
    adapter = both.artifact.path / "adapter"
    assert set(both.artifact.manifest.files_at("adapter")) == {
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    }
    assert str(tmp_path) not in (adapter / "adapter_config.json").read_text()
    assert_same_logprobs(adapter, policy, both.artifact.path / "checkpoint")
    found = load_file(adapter / "adapter_model.safetensors")
    found.popitem()
    save_file(found, adapter / "adapter_model.safetensors")
    with pytest.raises(DamagedArtifactError):
        Store.open(str(tmp_path / "store")).verify(both.artifact)


def test_weights_are_saved_in_the_dtype_asked_for(tmp_path, policy, pairs):
    found = train(tmp_path / "store", policy, [pairs], save_dtype="bfloat16", epochs=1)
    assert {weight.dtype for weight in weights_of(found).values()} == {torch.bfloat16}
    config = json.loads((found.artifact.path / "checkpoint" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_tied_embeddings_stay_tied(tmp_path, pairs):
    tied = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    found = train(tmp_path / "store", tied, [pairs])
    assert weights_of(found).keys() == load_file(tied / "model.safetensors").keys()
    checkpoint = found.artifact.path / "checkpoint"
    assert first_logprob(checkpoint, pairs, 7) > first_logprob(tied, pairs, 7) + 0.5


def test_weights_beyond_the_largest_file_are_saved_in_several(tmp_path, policy, pairs, monkeypatch):
    whole = train(tmp_path / "whole", policy, [pairs], reference_kind="ema", epochs=1)
    monkeypatch.setattr(save, "MAX_SHARD_SIZE", "20KB")
    found = train(tmp_path / "store", policy, [pairs], reference_kind="ema", epochs=1)
    for name in ("checkpoint", "ema"):
        folder = found.artifact.path / name
        shards = list(folder.glob("*.safetensors"))
        assert len(shards) > 1
        weights = {key: weight for each in shards for key, weight in load_file(each).items()}
        expected = load_file(whole.artifact.path / name / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[key]) for key, weight in weights.items())
        AutoModelForCausalLM.from_pretrained(folder)
