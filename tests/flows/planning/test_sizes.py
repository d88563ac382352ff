"""Parameters counted from a config.json, against the models that transformers makes."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flows.planning.sizes import UnknownSizeError, count_parameters, read_parameters
from stages.contract.request import FileInput, HubInput

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
        ("gemma", {"head_dim": 8}),
    ],
)
def test_parameters_are_counted_as_transformers_makes_them(model_type, changes):
    config = AutoConfig.for_model(model_type, **SMALL, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    values = json.loads(config.to_json_string(use_diff=False))
    assert count_parameters(values) == pytest.approx(model.num_parameters(), rel=0.01)


LLAMA = {"model_type": "llama", **SMALL}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama", "n_embd": 64}, "hidden_size is None"),
        ({**LLAMA, "num_local_experts": 8}, "with experts"),
        ([], "hidden_size is None"),
        ({**LLAMA, "vocab_size": "8"}, "vocab_size is '8'"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
    ids=["missing", "family", "list", "text", "zero"],
)
def test_a_model_that_cannot_be_counted_is_named_by_its_file(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownSizeError) as refused:
        read_parameters(FileInput(location=str(tmp_path), digest="0"))
    assert str(tmp_path) in str(refused.value)
    assert said in str(refused.value)


def test_a_model_of_the_hub_that_is_not_cached_names_the_remedy():
    with pytest.raises(UnknownSizeError, match=r"hf download owner/nothing config\.json"):
        read_parameters(HubInput(repo="owner/nothing", revision="0" * 40))
