"""Samplings that are refused, each by what is wrong with its inputs."""

from __future__ import annotations

import pytest

from stages.contract.digests import prompt_id
from stages.contract.errors import UserError
from stages.generate.params import GenerateParams
from tests.tiny_models import CHAT_TEMPLATE, WORDS, make_tiny_llama, make_tiny_tokenizer


def test_no_prompt_that_fits_is_an_error(generate):
    with pytest.raises(UserError, match="2 of 2 prompts are too long"):
        generate(["red " * 9, "blue " * 9], max_length_tokens=20)


def test_a_prompt_without_user_turn_is_named(generate):
    messages = [{"role": "system", "content": "red"}]
    with pytest.raises(UserError, match=f"prompt {prompt_id(messages)}: .*no user turn"):
        generate(["red", messages])


def test_an_empty_table_is_an_error(generate):
    with pytest.raises(UserError, match="empty"):
        generate([])


def test_a_policy_without_chat_template_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "bare", chat_template=None)
    with pytest.raises(UserError, match="no chat template"):
        generate(model=model)


def test_a_policy_without_tokenizer_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "bare")
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        generate(model=model)


def test_a_tokenizer_of_another_model_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "small", words=WORDS[:4])
    make_tiny_tokenizer().save_pretrained(model)
    with pytest.raises(UserError, match="not in the policy's vocabulary of 11"):
        generate(["red", "cat dog"], model=model)


def test_a_doubled_bos_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "double", chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
    with pytest.raises(UserError, match="doubled BOS"):
        generate(model=model)


def test_a_shard_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="shard_index 2 does not exist"):
        GenerateParams(shard_index=2, num_shards=2)
