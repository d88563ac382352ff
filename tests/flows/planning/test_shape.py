"""Weights counted from a config.json, against those of transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flows.planning.shape import ModelShape, read_shape
from stages.contract.request import FileInput, HubInput
from stages.contract.stores import open_store

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 32}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_weights_are_counted_as_transformers_makes_them(
    model_type: str, changes: dict[str, object]
) -> None:
    config = AutoConfig.for_model(model_type, **SMALL, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert ModelShape.from_config(config.to_dict()).params == model.num_parameters()


def test_a_token_of_a_mixture_passes_its_experts_only() -> None:
    dense = ModelShape.from_config(SMALL)
    mixture = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    shape = ModelShape.from_config(mixture)
    expert = 3 * 64 * 160
    assert shape.active_params == dense.active_params + 3 * (expert + 64 * 4)
    assert shape.params == dense.params + 3 * (3 * expert + 64 * 4)


def test_a_model_of_unknown_sizes_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"n_embd": 64}))
    store = open_store(str(tmp_path / "store"), create=True)
    found = read_shape(FileInput(location=str(tmp_path), digest="0"), store)
    assert isinstance(found, str)
    assert "hidden_size" in found


@pytest.mark.parametrize(
    "config",
    [[], {**SMALL, "text_config": None, "head_dim": "8"}, {**SMALL, "num_attention_heads": 0}],
    ids=["list", "text", "zero"],
)
def test_a_damaged_configuration_is_named_by_its_file(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    store = open_store(str(tmp_path / "store"), create=True)
    found = read_shape(FileInput(location=str(tmp_path), digest="0"), store)
    assert isinstance(found, str)
    assert str(tmp_path / "config.json") in found


def test_a_model_of_the_hub_that_is_not_cached_names_the_remedy(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"), create=True)
    found = read_shape(HubInput(repo="nobody/nothing-of-the-kind", revision="0" * 40), store)
    assert isinstance(found, str)
    assert "hf download nobody/nothing-of-the-kind config.json" in found
