"""Damaged checkpoints: the message names the file that is at fault."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from stages.contract.errors import UserError
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy
from stages.generate.vllm_engine import start_engine
from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm, load_model
from stages.modeling.tokenizers import load_tokenizer
from tests.tiny_models import make_tiny_llama, make_tiny_reward_model

Damage = Callable[[Path], object]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def content(name, data):
    data = data if isinstance(data, bytes) else data.encode()
    return lambda folder: (folder / name).write_bytes(data)


def bytes_of(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def settings(name, **changes):
    def damage(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def weights(change):
    def damage(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def filled(name, value):
    return weights(lambda found: found[name].view(-1)[-1:].fill_(value))


def replaced_by_folder(name):
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


OF_THE_MODEL = {
    "weights empty": (content(WEIGHTS, b""), [WEIGHTS]),
    "weights truncated": (bytes_of(WEIGHTS, lambda data: data[:-7]), [WEIGHTS]),
    "bytes after the weights": (bytes_of(WEIGHTS, lambda data: data + b"\0" * 64), [WEIGHTS]),
    "weights pickled": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        ["no weights in safetensors"],
    ),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
    "header too long": (bytes_of(WEIGHTS, lambda data: b"\xff" * 8 + data[8:]), [WEIGHTS]),
    "weights a folder": (replaced_by_folder(WEIGHTS), [WEIGHTS]),
    "one missing": (
        weights(lambda found: found.pop("model.norm.weight")),
        ["lacks 1 weights", "norm"],
    ),
    # It has all that a language model with tied embeddings needs.
    "a reward model": (
        weights(lambda found: found.update({"score.weight": torch.ones(1, 32)})),
        ["has besides 1 weights", "score.weight"],
    ),
    "not a number": (
        filled("model.layers.0.mlp.up_proj.weight", float("nan")),
        ["not a number", "model.layers.0.mlp.up_proj.weight"],
    ),
    "infinite": (filled("model.embed_tokens.weight", float("inf")), ["infinite"]),
    "another vocabulary": (
        settings("config.json", vocab_size=7),
        ["in other shapes than its config.json says", "[19, 32] for [7, 32]"],
    ),
    "more layers": (settings("config.json", num_hidden_layers=3), ["lacks", "layers.2"]),
    "a negative width": (settings("config.json", hidden_size=-32), ["hidden_size is -32"]),
    "an adapter as well": (content("adapter_config.json", "{}"), ["is a LoRA adapter"]),
    "an unknown activation": (settings("config.json", hidden_act="zelu"), ["zelu"]),
    "a width of text": (settings("config.json", hidden_size="big"), ["hidden_size"]),
    "an unknown model": (settings("config.json", model_type="nope"), ["nope"]),
    **{
        f"config.json {kind}": (content("config.json", data), ["config.json"])
        for kind, data in {
            "empty": "",
            "a list": "[]",
            "no UTF-8": b"\xff\xfe",
            "nested": "[" * 100_000,
            "without a type": "{}",
        }.items()
    },
    "generation_config.json a list": (
        content("generation_config.json", "[]"),
        ["generation_config.json"],
    ),
    "index half": (content(INDEX, "{"), [INDEX]),
    **{
        f"{kind} in the index": (
            content(INDEX, json.dumps({"weight_map": {"model.norm.weight": file}})),
            [INDEX, f"not in the folder: {file}"],
        )
        for kind, file in {
            "a missing file": "model-2.safetensors",
            "a file elsewhere": f"../{WEIGHTS}",
        }.items()
    },
    "index without a map": (content(INDEX, '{"metadata": {}}'), [INDEX]),
}


def without_words(folder):
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"] = {}
    document["added_tokens"] = []
    path.write_text(json.dumps(document))


OF_THE_TOKENIZER = {
    **{
        f"{name} {kind}": (content(name, data), [name])
        for name in ("tokenizer.json", "tokenizer_config.json")
        for kind, data in {"empty": "", "a list": "[]", "no UTF-8": b"\xff\xfe"}.items()
    },
    "tokenizer.json hollow": (content("tokenizer.json", "{}"), ["tokenizer", "cannot be loaded"]),
    "without words": (without_words, ["is empty"]),
    "config.json a list": (content("config.json", "[]"), ["config.json"]),
    "none": (lambda folder: (folder / "tokenizer.json").unlink(), ["has no tokenizer"]),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("whole") / "reward")


def refused(load, folder, parts):
    with pytest.raises(UserError) as caught:
        load(ModelSource(str(folder)))
    message = caught.value.message
    assert str(folder) in message
    assert len(message) < 1500
    for part in parts:
        assert part in message
    assert caught.value.remedy


def damaged(whole, folder, damage):
    shutil.copytree(whole, folder)
    damage(folder)
    return folder


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_a_damaged_policy_is_refused(tmp_path, whole, name):
    damage, parts = OF_THE_MODEL[name]
    folder = damaged(whole, tmp_path / "model", damage)
    refused(lambda source: load_causal_lm(source, dtype="float32"), folder, parts)


def test_vllm_is_not_given_damaged_weights(tmp_path, whole):
    damage, parts = OF_THE_MODEL["weights truncated"]
    folder = damaged(whole, tmp_path / "model", damage)
    params = GenerateParams(backend="vllm")
    refused(
        lambda source: start_engine(Policy(source, None, frozenset(), 128, 16), params),
        folder,
        parts,
    )


@pytest.mark.parametrize("name", ["weights truncated", "not a number", "another vocabulary"])
def test_a_damaged_reward_model_is_refused(tmp_path, reward_model, name):
    damage, parts = OF_THE_MODEL[name]
    folder = damaged(reward_model, tmp_path / "model", damage)
    parts = [part for part in parts if "32] for" not in part]
    load = partial(load_model, AutoModelForSequenceClassification, dtype="float32")
    refused(load, folder, parts)


@pytest.mark.parametrize("name", OF_THE_TOKENIZER)
def test_a_damaged_tokenizer_is_refused(tmp_path, whole, name):
    damage, parts = OF_THE_TOKENIZER[name]
    refused(load_tokenizer, damaged(whole, tmp_path / "model", damage), parts)


def test_lack_of_memory_does_not_blame_the_checkpoint(whole, monkeypatch):
    from transformers import AutoModelForCausalLM

    def fail(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(RuntimeError, match="allocate memory"):
        load_causal_lm(ModelSource(str(whole)), dtype="float32")
