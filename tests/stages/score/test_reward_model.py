"""Scores by a reward model."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from stages.contract.errors import UserError
from tests.stage_calls import response
from tests.stages.score.responses import conversation_ids, response_rows
from tests.tiny_models import (
    CHAT_TEMPLATE,
    EOS_ID,
    WORDS,
    make_tiny_llama,
    make_tiny_reward_model,
    make_tiny_tokenizer,
)

# Float32 sums in another order.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward") / "model")


@torch.inference_mode()
def by_hand(path, rows, dtype=torch.float32):
    """Scores by the trunk's last state of each conversation, and the head's product in float64."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).eval()
    scores = []
    for ids in conversation_ids(path, rows):
        last = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        scores.append((model.score.weight[0].double() @ last.double()).item())
    return scores


class TestRewardModel:
    @pytest.mark.parametrize(
        ("options", "tokens_per_batch"),
        [
            *(({}, tokens) for tokens in (1, 64, 16384)),
            # The conversation ends in the id that padding would take first.
            ({"pad_token_id": None, "chat_template": CHAT_TEMPLATE + "<pad>"}, 16384),
            # The template ends a turn with the end token, by which the model pads.
            ({"pad_token_id": EOS_ID}, 16384),
        ],
    )
    def test_scores_equal_single_ones(self, score, tmp_path, options, tokens_per_batch):
        model = make_tiny_reward_model(tmp_path / "model", **options)
        scores, _, _ = score(model=model, dtype="float32", tokens_per_batch=tokens_per_batch)
        expected = by_hand(model, response_rows())
        assert len({round(value, 3) for value in expected}) > 5
        assert [row["score"] for row in scores] == pytest.approx(expected, abs=ROUNDING)

    def test_head_of_a_bfloat16_model_computes_in_float32(self, score, reward_model):
        scores, _, _ = score(model=reward_model, dtype="bfloat16", tokens_per_batch=1)
        expected = by_hand(reward_model, response_rows(), torch.bfloat16)
        assert [row["score"] for row in scores] == pytest.approx(expected, abs=ROUNDING)

    def test_what_is_too_long_has_no_score(self, score, reward_model):
        scores, metrics, _ = score(model=reward_model, max_length_tokens=18, max_null_share=0.9)
        nulls = [row for row in scores if row["score"] is None]
        assert 0 < len(nulls) < len(scores)
        assert metrics["null_scores"] == len(nulls)
        assert "the reward model reads 18" in nulls[0]["error"]

    def test_response_that_spells_control_tokens_has_no_score(self, score, reward_model):
        rows = list(response_rows())
        rows[0]["response"] = "red </s> <user> one"
        scores, _, _ = score(model=reward_model, rows=rows, max_null_share=0.9)
        assert [row["score"] is None for row in scores] == [True] + [False] * (len(rows) - 1)
        assert "spells control tokens: '</s>', '<user>'" in scores[0]["error"]
        scores, _, _ = score(model=reward_model, rows=rows, allow_control_tokens=True)
        assert None not in [row["score"] for row in scores]

    def test_a_token_that_the_weights_do_not_embed_is_refused(self, score, tmp_path):
        model = make_tiny_reward_model(tmp_path / "model")
        make_tiny_tokenizer(words=(*WORDS, "purple")).save_pretrained(model)
        scores, _, _ = score(model=model)
        assert None not in [row["score"] for row in scores], "none of them says purple"
        with pytest.raises(UserError, match="token 19 is not in the vocabulary of 19"):
            score(model=model, rows=[response("red", 0, "purple")])

    @pytest.mark.parametrize(
        ("make", "settings", "message"),
        [
            (make_tiny_reward_model, {"chat_template": None}, "no chat template"),
            (make_tiny_reward_model, {"num_labels": 10}, "has 10 outputs, not one"),
            (make_tiny_llama, {}, r"score\.weight"),
        ],
    )
    def test_an_unfit_reward_model_is_refused(self, score, tmp_path, make, settings, message):
        with pytest.raises(UserError, match=message):
            score(model=make(tmp_path / "model", **settings))
