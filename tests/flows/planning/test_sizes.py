"""Weights counted from a config.json, against the models that transformers makes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flows.planning.sizes import ModelShape, UnknownModelError, read_shape
from stages.contract.request import FileInput, HubInput
from stages.store.base import Store

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
        ("qwen3", {"tie_word_embeddings": False}),
    ],
)
def test_weights_are_counted_as_transformers_makes_them(
    model_type: str, changes: dict[str, object]
) -> None:
    config = AutoConfig.for_model(model_type, **SMALL, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    values = json.loads(config.to_json_string(use_diff=False))
    assert ModelShape.model_validate(values).params == model.num_parameters()


LLAMA = {"model_type": "llama", **SMALL}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama", "n_embd": 64}, "hidden_size: Field required"),
        ({**LLAMA, "model_type": "mixtral"}, "model_type: Input should be 'llama'"),
        ([], "a valid dictionary"),
        ({**LLAMA, "head_dim": "8"}, "head_dim"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads"),
    ],
    ids=["missing", "family", "list", "text", "zero"],
)
def test_a_model_that_cannot_be_counted_is_named_by_its_file(
    store: Store, tmp_path: Path, config: object, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownModelError) as found:
        read_shape(FileInput(location=str(tmp_path), digest="0"), store)
    assert str(tmp_path / "config.json") in str(found.value)
    assert said in str(found.value)


def test_a_model_of_the_hub_that_is_not_cached_names_the_remedy(store: Store) -> None:
    with pytest.raises(UnknownModelError, match=r"hf download nobody/nothing config\.json"):
        read_shape(HubInput(repo="nobody/nothing", revision="0" * 40), store)
