"""No sequence changes the log-probabilities of its neighbours: lengths that would are refused."""

import copy
import io
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.generate import transformers_backend
from stages.generate.backend import EncodedPrompt
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy, load_policy
from stages.harness.context import ModelSource
from stages.modeling.probe import require_static_rope
from stages.score import reward_model
from stages.score.oracle import OracleVerdict
from tests import tiny_models

LIMIT = 16
SIZES = tiny_models.SIZES | {"num_hidden_layers": 1, "initializer_range": 0.5}
SHORT = SIZES | {"max_position_embeddings": LIMIT}
LONGROPE = Phi3Config(
    **SIZES,
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
    **SHORT, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
)
STATIC = LlamaConfig(**SIZES)


def neighbour_moves(config, width):
    """True where a row's output changes when the rows of its batch are ``width`` tokens long."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    row = torch.arange(3, 11)[None]
    alone = model(row).logits[0]
    beside = model(torch.nn.functional.pad(row, (0, width - 8))).logits[0, :8]
    return not torch.allclose(alone, beside, atol=1e-5)


def refused(config, longest):
    try:
        require_static_rope(config, "it", longest=longest, remedy="set {limit}")
    except UserError as error:
        assert error.remedy == f"set {LIMIT}"
        assert str(longest) in error.message
        return True
    return False


@pytest.mark.parametrize("width", [LIMIT, LIMIT + 1])
@pytest.mark.parametrize("config", [LONGROPE, DYNAMIC, STATIC], ids=["longrope", "dynamic", "none"])
def test_lengths_that_move_a_neighbour_are_refused(config, width):
    assert refused(config, width) == neighbour_moves(config, width)
    assert refused(config, width) == (config is not STATIC and width > LIMIT)


def test_sampling_stays_below_the_length_that_moves_a_neighbour(monkeypatch):
    model = AutoModelForCausalLM.from_config(LONGROPE).eval()
    monkeypatch.setattr(transformers_backend, "load_causal_lm", lambda source, *, dtype: model)
    tokenizer = SimpleNamespace(pad_token_id=0)
    policy = Policy(ModelSource("here"), tokenizer, frozenset({2}), 64, 37)
    params = GenerateParams(num_samples=1, max_new_tokens=4, temperature=0.0)
    backend = transformers_backend.load(policy, params, Emitter(io.StringIO()))
    short, long = (EncodedPrompt([3] * length, [0]) for length in (4, LIMIT - 4))
    assert len(list(backend.generate([short, long]))) == 2
    longer = EncodedPrompt([3] * (LIMIT - 3), [0])
    with pytest.raises(UserError, match=f"a sequence has {LIMIT + 1} tokens") as caught:
        list(backend.generate([short, longer]))
    assert f"generate.max_length_tokens={LIMIT}" in caught.value.remedy


def test_vllm_is_not_given_a_context_of_other_frequencies(tmp_path):
    """Its engine takes them for each sequence, however short: training would not."""
    source = ModelSource(str(tiny_models.save_tiny_model(copy.deepcopy(LONGROPE), tmp_path)))
    params = {"max_new_tokens": 4}
    assert load_policy(source, GenerateParams(**params)).max_length_tokens == 64
    params |= {"backend": "vllm"}
    with pytest.raises(UserError, match=r"\(longrope\) changes") as caught:
        load_policy(source, GenerateParams(**params))
    assert caught.value.remedy == f"set generate.max_length_tokens={LIMIT}"
    policy = load_policy(source, GenerateParams(**params, max_length_tokens=LIMIT))
    assert policy.max_length_tokens == LIMIT


def test_a_reward_model_reads_no_conversation_that_moves_a_neighbour(monkeypatch):
    monkeypatch.setattr(reward_model, "render_conversation", lambda tokenizer, turns: turns[0])
    classifier = Mock(config=LONGROPE, device="cpu")
    model = reward_model.RewardModel(
        classifier,
        source=ModelSource("reward"),
        read=lambda output: [OracleVerdict(1.0)],
        tokenizer=None,
        identity="it",
        max_length_tokens=64,
        tokens_per_batch=64,
        allow_control_tokens=True,
    )

    def row(length):
        prompt = {"prompt_id": "a", "sample_index": 0}
        return prompt | {"messages": [[3] * length], "response": ""}

    assert len(list(model.score([row(LIMIT)]))) == 1
    with pytest.raises(UserError, match=f"a sequence has {LIMIT + 1} tokens"):
        list(model.score([row(1), row(LIMIT + 1)]))
