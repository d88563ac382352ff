"""Weights that a training writes: names, dtypes, merged adapters, the average reference."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.modeling import save
from tests.stages.train.checkpoints import first_logprob, weights_of
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


def test_lora_saves_merged_weights(tmp_path, policy, pairs):
    training = train(tmp_path / "store", policy, [pairs], lora={"rank": 4, "alpha": 8.0})
    start, end = load_file(policy / "model.safetensors"), weights_of(training)
    assert start.keys() == end.keys()
    changed = {name for name in end if not torch.equal(start[name], end[name])}
    assert changed == {name for name in end if "_proj" in name}
    assert training.records[-1]["preference_loss"] < training.records[0]["preference_loss"]
    # The merged checkpoint is what was trained: its log-ratios go on where training ended.
    on = {"reference": policy, "epochs": 1, "learning_rate": 1e-9}
    again = train(tmp_path / "again", training.artifact.path / "checkpoint", [pairs], **on)
    assert again.records[0]["margin"] > 1.0


def test_tied_embeddings_stay_tied(tmp_path, pairs):
    tied = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    training = train(tmp_path / "store", tied, [pairs])
    assert weights_of(training).keys() == load_file(tied / "model.safetensors").keys()
    checkpoint = training.artifact.path / "checkpoint"
    assert first_logprob(checkpoint, pairs, 7) > first_logprob(tied, pairs, 7) + 0.5


def test_weights_beyond_the_largest_file_are_saved_in_several(tmp_path, policy, pairs, monkeypatch):
    whole = train(tmp_path / "whole", policy, [pairs], epochs=1)
    monkeypatch.setattr(save, "MAX_SHARD_SIZE", "20KB")
    training = train(tmp_path / "store", policy, [pairs], epochs=1)
    folder = training.artifact.path / "checkpoint"
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) > 1
    weights = {name: weight for shard in shards for name, weight in load_file(shard).items()}
    expected = load_file(whole.artifact.path / "checkpoint" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    AutoModelForCausalLM.from_pretrained(folder)
