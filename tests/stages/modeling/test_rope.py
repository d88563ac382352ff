"""No sequence changes the log-probabilities of its neighbours: lengths that would are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from stages.contract.errors import UserError
from stages.modeling.probe import require_static_rope

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LIMIT = 16
LONGROPE = Phi3Config(
    **SIZES,
    max_position_embeddings=64,
    original_max_position_embeddings=LIMIT,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": LIMIT,
    },
)
DYNAMIC = LlamaConfig(
    **SIZES,
    max_position_embeddings=LIMIT,
    rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
)
STATIC = LlamaConfig(**SIZES, max_position_embeddings=LIMIT)


def neighbour_moves(config: Any, width: int) -> bool:
    """True where a row's output changes when the rows of its batch are ``width`` tokens long."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    row = torch.arange(3, 11)[None]
    alone = model(row).logits[0]
    beside = model(torch.nn.functional.pad(row, (0, width - 8))).logits[0, :8]
    return not torch.allclose(alone, beside, atol=1e-5)


def refused(config: Any, longest: int) -> bool:
    try:
        require_static_rope(config, "it", longest=longest, remedy="set {limit}")
    except UserError as error:
        assert error.remedy == f"set {LIMIT}"
        assert str(longest) in error.message
        return True
    return False


@pytest.mark.parametrize("width", [LIMIT, LIMIT + 1])
@pytest.mark.parametrize("config", [LONGROPE, DYNAMIC, STATIC], ids=["longrope", "dynamic", "none"])
def test_the_lengths_that_move_a_neighbour_are_those_refused(config, width):
    assert refused(config, width) == neighbour_moves(config, width)
    assert refused(config, width) == (config is not STATIC and width > LIMIT)
