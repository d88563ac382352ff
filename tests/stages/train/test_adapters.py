"""Adapters of every kind of layer are in the checkpoint that is saved, or refused at once."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen3MoeConfig,
)

from stages.contract.errors import UserError
from stages.modeling.save import save_checkpoint
from stages.training.adapters import add_adapters, merge_adapters
from stages.training.params import LoraParams
from tests.stages.train.train_helpers import train
from tests.tiny_models import SIZES as TINY
from tests.tiny_models import make_tiny_tokenizer, save_tiny_model

SIZES = {**TINY, "initializer_range": 0.2}
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
QWEN3_MOE = Qwen3MoeConfig(
    **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
)
PHIMOE = PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
GPT2 = GPT2Config(**SIZES, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
LLAMA = LlamaConfig(**SIZES)
TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
LORA = LoraParams(rank=4, alpha=8.0)
IDS = torch.arange(3, 15)[None]


def base_model(config):
    """A model of the same random weights each time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def adapted_model(config):
    """A model whose adapters change its output."""
    model = base_model(config)
    before = model(IDS).logits
    adapted = add_adapters(model, LORA)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.eval()
    assert not torch.allclose(adapted(IDS).logits, before, atol=1e-2)
    return adapted


@pytest.mark.parametrize(
    "config", [LLAMA, TIED, MIXTRAL, QWEN3_MOE, GPT2], ids=lambda config: config.model_type
)
def test_what_is_saved_answers_as_the_model_with_adapters_did(tmp_path, config):
    adapted = adapted_model(config)
    expected = adapted(IDS).logits
    adapters = {name: weight for name, weight in adapted.state_dict().items() if "lora_" in name}
    weights = merge_adapters(base_model(config), LORA, adapters)
    model = adapted.base_model.model
    save_checkpoint(model, weights, make_tiny_tokenizer(), tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(loaded(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_dropout_gets_its_adapters_merged(tmp_path, pairs):
    config = GPT2Config(**SIZES, attn_pdrop=0.1, resid_pdrop=0.1)
    policy = save_tiny_model(config, tmp_path / "policy")
    settings = {"epochs": 1, "row_layout": "padded", "learning_rate": 1e-2, "lora": {"rank": 4}}
    trained = train(tmp_path / "store", policy, [pairs], **settings).tensors
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(trained[name], load_file(policy / "model.safetensors")[name])


def test_adapters_that_could_not_be_merged_are_refused():
    # Its router gives experts with its logits: an adapter cannot add to them.
    model = AutoModelForCausalLM.from_config(PHIMOE)
    with pytest.raises(UserError, match=r"tuple") as caught:
        add_adapters(model, LORA)
    assert "lora.rank to 0" in caught.value.remedy
