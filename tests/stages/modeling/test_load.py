import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaForCausalLM,
)

from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.checkpoint_files import explained
from stages.modeling.load import (
    context_tokens,
    load_causal_lm,
    load_model,
    load_model_config,
)
from stages.modeling.save import save_checkpoint
from stages.modeling.tokenizers import load_tokenizer, require_same_tokenizer
from tests.tiny_models import (
    SIZES,
    make_head_beside_a_tied_config,
    make_tiny_llama,
    tiny_config,
)


@pytest.fixture
def checkpoint(tmp_path):
    return make_tiny_llama(tmp_path / "model")


def source(path):
    return ModelSource(str(path))


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_a_model_comes_in_the_type_asked_for_and_in_evaluation_mode(checkpoint, name, dtype):
    model = load_causal_lm(source(checkpoint), dtype=name)
    assert model.dtype == dtype
    assert not model.training


@pytest.mark.parametrize("load", [load_tokenizer, lambda s: load_causal_lm(s, dtype="float32")])
def test_a_missing_folder_is_named(tmp_path, load):
    with pytest.raises(UserError, match="absent"):
        load(source(tmp_path / "absent"))


def test_the_context_is_the_models_unless_less_is_wanted(checkpoint):
    config = tiny_config(20, max_position_embeddings=128)
    assert context_tokens(config, None, source(checkpoint)) == 128
    assert context_tokens(config, 64, source(checkpoint)) == 64
    with pytest.raises(UserError, match="max_length_tokens is 129"):
        context_tokens(config, 129, source(checkpoint))


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_the_cap_of_attention_scores_is_kept(tmp_path, kind):
    """Policy and reward model: sdpa knows no cap, and drops it without a word."""
    sizes = SIZES | {"head_dim": 8, "num_labels": 1, "initializer_range": 0.4}
    kind.from_config(Gemma2Config(**sizes, attn_logit_softcapping=0.5)).save_pretrained(tmp_path)
    ids = torch.arange(3, 15)[None]
    outputs = [
        model(ids).logits
        for model in (
            load_model(kind, source(tmp_path), dtype="float32"),
            kind.from_pretrained(tmp_path, attn_implementation="eager"),
            kind.from_pretrained(tmp_path, attn_implementation="sdpa"),
        )
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-2)


def test_weights_that_stay_quantised_are_refused(tmp_path, monkeypatch):
    """As FP8 weights do on a GPU that can compute with them."""
    plain = LlamaForCausalLM(tiny_config(19, hidden_size=128, tie_word_embeddings=True))
    plain.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("proj.weight")]:
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in stored[name].shape]
        stored[f"{name}_scale_inv"] = torch.ones(blocks)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    with pytest.raises(UserError, match="is quantised"):
        load_causal_lm(source(tmp_path), dtype="float32", device=torch.device("cpu"))


def test_a_package_that_a_model_of_the_hub_needs_is_named():
    with (
        pytest.raises(UserError, match="the model of owner/model cannot be loaded: gptqmodel"),
        explained("the model", ModelSource("owner/model", "0" * 40)),
    ):
        raise ImportError("gptqmodel is needed")


class TestHead:
    """A configuration calls the head tied: the weights decide."""

    @pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
    def test_head_in_the_file_is_kept(self, tmp_path, shard_size):
        plain = make_tiny_llama(tmp_path / "plain")
        odd = make_head_beside_a_tied_config(tmp_path / "odd")
        if shard_size == "10KB":
            (odd / "model.safetensors").unlink()
            model = AutoModelForCausalLM.from_pretrained(plain)
            model.save_pretrained(tmp_path / "parts", max_shard_size=shard_size)
            for part in (tmp_path / "parts").glob("model*"):
                part.rename(odd / part.name)
        assert not load_model_config(source(odd)).tie_word_embeddings
        model = load_causal_lm(source(odd), dtype="float32")
        assert not model.config.tie_word_embeddings
        expected = AutoModelForCausalLM.from_pretrained(plain)
        ids = torch.arange(3, 15)[None]
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)

    def test_equal_or_missing_head_stays_tied(self, tmp_path):
        tied = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
        weights = load_file(tied / "model.safetensors")
        assert load_model_config(source(tied)).tie_word_embeddings
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_file(weights, tied / "model.safetensors", metadata={"format": "pt"})
        assert load_model_config(source(tied)).tie_word_embeddings
        model = load_causal_lm(source(tied), dtype="float32")
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tokenizer_with_another_end_token_is_named(checkpoint, tmp_path):
    other = make_tiny_llama(tmp_path / "other")
    tokenizer = load_tokenizer(source(other))
    tokenizer.eos_token = "<assistant>"
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match="eos_token_id"):
        require_same_tokenizer(source(checkpoint), source(other))


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [({"temperature": 0.9}, 0.9), ({"temperature": 0.9, "length_penalty": 2.0}, None)],
    ids=["sampling", "beams"],
)
def test_a_model_with_settings_that_cannot_be_saved_is_saved(
    checkpoint, tmp_path, settings, temperature
):
    (checkpoint / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 2}))
    model = load_causal_lm(source(checkpoint), dtype="float32")
    tokenizer = load_tokenizer(source(checkpoint))
    save_checkpoint(model, model.state_dict(), tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert (saved.get("temperature"), saved["eos_token_id"]) == (temperature, 2)
