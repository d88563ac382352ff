"""Trainings that are refused, each with its remedy."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.contract.errors import UserError
from stages.tables.schemas import PAIRS, read_rows, write_table
from tests.stages.train.train_helpers import make_pairs, train
from tests.tiny_models import WORDS, make_tiny_llama


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"design": "selm", "divergence": "forward_kl"}, "not defined under forward_kl"),
        ({"learning_rate": 1e30}, "training diverged at step"),
        ({"design": "selm", "kappa": 1e25}, "training diverged at step 1: .*grad_norm inf"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, policy, pairs, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        train(tmp_path / "store", policy, [pairs], **changes)
    assert caught.value.remedy


def test_lengths_at_which_sequences_change_their_neighbours_are_refused(tmp_path, pairs):
    stretched = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    short = make_tiny_llama(
        tmp_path / "short", max_position_embeddings=8, rope_parameters=stretched
    )
    with pytest.raises(UserError, match="rotary embedding") as caught:
        train(tmp_path / "store", short, [pairs])
    assert caught.value.remedy == "set train.max_length_tokens=8"
    remedied = {"max_length_tokens": 8, "max_prompt_tokens": 4, "epochs": 1}
    assert train(tmp_path / "store", short, [pairs], **remedied).summary["steps"] == 4


def test_a_policy_without_a_tokenizer_is_refused(tmp_path, policy, pairs):
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(policy).save_pretrained(bare)
    with pytest.raises(UserError, match="tokenizer"):
        train(tmp_path / "store", bare, [pairs])


def test_a_reference_with_another_tokenizer_is_refused(tmp_path, policy, pairs):
    words = [*WORDS[:-1], "purple"]
    reference = make_tiny_llama(tmp_path / "reference", words=words)
    with pytest.raises(UserError, match="differ in 2 tokens") as caught:
        train(tmp_path / "store", policy, [pairs], reference=reference)
    assert "reference with the policy's tokenizer" in caught.value.remedy


def test_a_published_bonus_without_a_value_is_explained(tmp_path, policy, pairs):
    # log π of a tied pair's response is 0 where one token is all of the vocabulary's mass.
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        model.get_input_embeddings().weight.fill_(1.0)
        model.get_output_embeddings().weight[5] = 1000.0
    model.save_pretrained(tmp_path / "sure")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "sure")
    settings = {"design": "arctanh", "divergence": "forward_kl", "numerics": "paper"}
    sure = make_sure_pairs(tmp_path / "sure.parquet", 5)
    with pytest.raises(UserError, match=r"train\.numerics 'paper'.*π > 1 − 1e-5") as caught:
        train(tmp_path / "store", tmp_path / "sure", [sure], **settings)
    assert "'exact'" in caught.value.remedy
    found = train(tmp_path / "exact", tmp_path / "sure", [sure], **settings | {"numerics": "exact"})
    assert all(math.isfinite(loss) for loss in found.losses)


def make_sure_pairs(path, token):
    """Pairs whose responses are one token, over and over."""
    rows = list(read_rows(make_pairs(path.with_suffix(".random"), 8), PAIRS))
    for row in rows:
        for side in ("chosen", "rejected"):
            row[f"{side}_token_ids"] = [token] * len(row[f"{side}_token_ids"])
    write_table(path, PAIRS, iter(rows))
    return path
