"""Samplings that are refused, each by what is wrong with its inputs."""

import pytest

from stages.contract.digests import prompt_id
from stages.contract.errors import UserError
from stages.generate.params import GenerateParams
from tests.tiny_models import CHAT_TEMPLATE, WORDS, make_tiny_llama, make_tiny_tokenizer

ALONE = [{"role": "system", "content": "red"}]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["red " * 9, "blue " * 9], "2 of 2 prompts are too long"),
        (["red", ALONE], f"prompt {prompt_id(ALONE)}: .*no user turn"),
        ([], "empty"),
    ],
)
def test_prompts_are_refused(generate, texts, message):
    with pytest.raises(UserError, match=message):
        generate(texts, max_length_tokens=20)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ bos_token }}" + CHAT_TEMPLATE, "doubled BOS"),
        ("{{ bos_token }}red", "renders two prompts alike"),
        ("{{ 1 / 0 }}", "chat template refuses a prompt with roles user: division by zero"),
    ],
)
def test_a_chat_template_is_refused(generate, tmp_path, template, message):
    with pytest.raises(UserError, match=message):
        generate(model=make_tiny_llama(tmp_path / "model", chat_template=template))


def test_a_missing_or_foreign_tokenizer_is_refused(generate, tmp_path):
    model = make_tiny_llama(tmp_path / "small", words=WORDS[:4])
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        generate(model=model)
    make_tiny_tokenizer().save_pretrained(model)
    with pytest.raises(UserError, match="not in the policy's vocabulary of 11"):
        generate(["red", "cat dog"], model=model)


def test_a_shard_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="shard_index 2 does not exist"):
        GenerateParams(shard_index=2, num_shards=2)
