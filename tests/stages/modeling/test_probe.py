"""A few short rows show which families of models would be wrong without an error."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    NemotronConfig,
    PhimoeConfig,
    Qwen3MoeConfig,
)

from stages.modeling.logprobs import LogitMap
from stages.modeling.probe import (
    UnfitModelError,
    check_logprobs,
    check_training_mode,
    share_prompts,
)
from stages.modeling.shared_prefix import SHARED_PREFIX
from stages.training.policy import remove_dropout
from tests.tiny_models import SIZES

EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}


def make(config):
    torch.manual_seed(0)
    # A model keeps its configuration, with the name of its attention.
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


RIGHT = {
    "llama": LlamaConfig(**SIZES),
    "mistral, windowed": MistralConfig(**SIZES, sliding_window=32),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "gpt2": GPT2Config(**SIZES, n_inner=48, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", RIGHT.values(), ids=RIGHT)
def test_a_family_that_is_right_passes_and_is_left_as_it_was(config, dtype):
    model = make(config).to(dtype)
    ids = torch.arange(3, 12)[None]
    expected = model(ids).logits
    random_state = torch.get_rng_state()
    check_logprobs(model)
    check_training_mode(model)
    share_prompts(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.config._attn_implementation == SHARED_PREFIX
    assert not model.training
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (NemotronConfig(**SIZES), "lose the layout"),
        (PhimoeConfig(**SIZES, **EXPERTS, sliding_window=32), "or a sliding window"),
        (GptOssConfig(**SIZES, head_dim=8, **EXPERTS), "s_aux"),
        (FalconConfig(**SIZES), "its own attention"),
    ],
    ids=lambda each: getattr(each, "model_type", ""),
)
def test_packed_rows_that_would_be_wrong_are_refused(config, reason, dtype):
    model = make(config).to(dtype)
    check_logprobs(model)
    with pytest.raises(UnfitModelError, match=reason):
        share_prompts(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Llama4TextConfig(**SIZES, head_dim=8, intermediate_size_mlp=48), "names no decoder"),
        (ModernBertDecoderConfig(**SIZES, cls_token_id=1, sep_token_id=2), "without bias"),
        (BertConfig(**SIZES), "without bias"),
    ],
    ids=lambda each: getattr(each, "model_type", ""),
)
def test_log_probabilities_that_would_be_wrong_are_refused(config, reason):
    with pytest.raises(UnfitModelError, match=reason):
        check_logprobs(make(config))


@pytest.mark.parametrize("silent", [0, 1, 36])
def test_an_unknown_cap_is_noticed(silent, monkeypatch):
    monkeypatch.setattr(LogitMap, "of", classmethod(lambda cls, model: cls()))
    capped = make(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=1.0))
    with torch.no_grad():
        capped.get_input_embeddings().weight[silent] = 0.0
    with pytest.raises(UnfitModelError, match="changed after the head"):
        check_logprobs(capped)


def test_a_model_whose_tokens_see_later_ones_is_refused():
    model = make(LlamaConfig(**SIZES))
    model.config.is_causal = False
    with pytest.raises(UnfitModelError, match="depends on the tokens after it"):
        check_logprobs(model)


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SIZES, **EXPERTS, router_jitter_noise=0.01),
        # It samples experts: the threshold below which one may be drawn is wide enough for all.
        PhimoeConfig(**SIZES, **EXPERTS, router_jitter_noise=10.0),
    ],
    ids=lambda each: each.model_type,
)
def test_random_routing_is_refused(config):
    with pytest.raises(UnfitModelError, match="training mode"):
        check_training_mode(make(config))


def test_a_model_without_dropout_answers_the_same_every_time():
    model = make(LlamaConfig(**SIZES, attention_dropout=0.5)).train()
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 12)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    remove_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_head_of_its_own_kind_is_refused():
    model = make(LlamaConfig(**SIZES))
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(UnfitModelError, match="Sequential"):
        check_logprobs(model)
    with pytest.raises(UnfitModelError, match="without bias"):
        check_logprobs(make(GPTJConfig(**SIZES, rotary_dim=4)))
