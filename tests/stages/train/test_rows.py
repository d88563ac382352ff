"""Packed rows with shared prompts give what padded rows give, for every family of models."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.logprobs import ResponseLogprobs
from stages.modeling.shared_prefix import SHARED_PREFIX
from stages.objectives.objective import ResponseLogps, geb_objective
from stages.objectives.params import ObjectiveParams
from stages.train.data import Pair, Response, truncate
from stages.train.params import TrainParams
from stages.training.adapters import add_adapters
from stages.training.batches import ROWS
from stages.training.params import LoraParams
from stages.training.policy import Numerics, load_logprob_model
from tests.tiny_models import SIZES as TINY
from tests.tiny_models import save_tiny_model

SIZES = {**TINY, "num_hidden_layers": 3, "initializer_range": 0.2}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama-all-heads-tied": LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=True
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-windowed": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-windowed": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
}
LIMIT = 24
MODES = {"full": (0, False), "checkpointed": (0, True), "lora": (4, False), "lora-c": (4, True)}


def a_pair(index, prompt, chosen, rejected):
    random = np.random.default_rng(index)

    def ids(length):
        return random.integers(3, SIZES["vocab_size"], length).astype(np.int32)

    def response(length):
        return Response(ids(length), np.full(length, -3.0, dtype=np.float32), 0.0)

    return Pair(index, str(index), ids(prompt), response(chosen), response(rejected), index == 2)


def odd_pairs():
    """One-token prompts and responses, equal responses, rows at the limit, truncated rows."""
    lengths = [(1, 1, 1), (1, 5, 2), (7, 1, 6), (9, 4, 4), (3, LIMIT - 3, 1), (LIMIT - 1, 1, 1)]
    pairs = [a_pair(index, *sizes) for index, sizes in enumerate(lengths)]
    equal = a_pair(6, 4, 5, 5)
    pairs.append(Pair(6, "6", equal.prompt, equal.chosen, equal.chosen, tie=False))
    params = TrainParams(max_length_tokens=LIMIT, max_prompt_tokens=6)
    # Neither response keeps its end-of-sequence token.
    pairs.append(truncate(a_pair(7, 20, 30, 25), params))
    return pairs


def make_model(config, layout, rank, checkpointed):
    torch.manual_seed(0)
    attention = SHARED_PREFIX if layout == "packed" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not rank:
        return ResponseLogprobs(model).train()
    adapted = add_adapters(model, LoraParams(rank=rank))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return ResponseLogprobs(adapted).train()


def compute(model, pairs, layout):
    """Log-probabilities of the sequences, the loss, and the gradients."""
    rows = ROWS[layout](pairs)
    mask = rows.response_mask
    token_logp = rows.pad_responses(rows.logprobs(model))
    reference = torch.where(mask, -3.0, 0.0)
    sides = [
        ResponseLogps(token_logp[part], reference[part], mask[part])
        for part in (slice(0, len(pairs)), slice(len(pairs), None))
    ]
    params = ObjectiveParams(design="arctanh", probability="token", beta=0.1, nll_weight=0.5)
    ties = torch.tensor([pair.tie for pair in pairs])
    loss = geb_objective(*sides, params, ties).loss(0.7).mean()
    loss.backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return token_logp.sum(dim=1).detach(), loss.detach(), gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_give_the_padded_rows_values_and_gradients(family, mode):
    rank, checkpointed = MODES[mode]
    pairs = odd_pairs()
    expected = compute(make_model(FAMILIES[family], "padded", rank, checkpointed), pairs, "padded")
    packed = compute(make_model(FAMILIES[family], "packed", rank, checkpointed), pairs, "packed")
    torch.testing.assert_close(packed[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[1], expected[1], rtol=1e-5, atol=1e-6)
    assert packed[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        gap = (packed[2][name] - gradient).norm() / gradient.norm()
        assert gap < 1e-5, (name, float(gap))


def test_a_model_with_an_attention_of_its_own_is_refused(tmp_path):
    config = GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    policy = save_tiny_model(config, tmp_path)
    params = TrainParams()
    numerics = Numerics.of(params, on_gpu=False, local_rank=0)
    with pytest.raises(UserError, match="cannot be packed") as caught:
        load_logprob_model(ModelSource(str(policy)), params, numerics)
    assert "train.row_layout=padded" in caught.value.remedy
