import pytest
import torch

from stages.contract.errors import UserError
from stages.modeling.chat import render_prompt
from stages.sft.examples import (
    global_batches,
    make_example,
    make_examples,
    micro_batches,
)
from stages.sft.tokenizer import make_word_tokenizer
from tests.tiny_models import make_tiny_tokenizer

CONVERSATION = [
    {"role": "system", "content": "one"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": "three cat"},
    {"role": "assistant", "content": "blue bird runs"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def test_only_the_last_answer_and_its_end_count(tokenizer):
    example = make_example(tokenizer, CONVERSATION)
    prompt = render_prompt(tokenizer, CONVERSATION[:-1])
    assert list(example.token_ids[: example.num_prompt_tokens]) == prompt
    response = tokenizer.convert_ids_to_tokens(list(example.token_ids[len(prompt) :]))
    assert response == ["blue", "bird", "runs", "</s>"]
    assert example.num_response_tokens == 4


def test_what_a_template_writes_after_the_end_is_cut():
    template = make_word_tokenizer(["one"], max_length=8).chat_template
    tokenizer = make_tiny_tokenizer(
        chat_template=template.replace("eos_token", "eos_token + 'one'")
    )
    example = make_example(tokenizer, CONVERSATION[-2:])
    assert example.token_ids[-1] == tokenizer.eos_token_id


def test_a_template_that_does_not_continue_the_prompt_is_refused():
    template = (
        "{{ bos_token }}{{ 'one ' if add_generation_prompt else 'two ' }}"
        "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    )
    with pytest.raises(UserError, match="does not continue a prompt"):
        make_example(make_tiny_tokenizer(chat_template=template), CONVERSATION)


def test_long_conversations_are_left_out_and_counted(tokenizer):
    length = len(make_example(tokenizer, CONVERSATION))
    short = CONVERSATION[-2:]
    examples, num_dropped = make_examples(tokenizer, [CONVERSATION, short, CONVERSATION], length)
    assert (len(examples), num_dropped) == (3, 0)
    examples, num_dropped = make_examples(tokenizer, [CONVERSATION, short], length - 1)
    assert (len(examples), num_dropped) == (1, 1)
    with pytest.raises(UserError, match="all 1 conversations are longer than"):
        make_examples(tokenizer, [CONVERSATION], length - 1)


def test_every_epoch_has_every_example_once_in_an_order_of_its_own():
    epochs = [
        [index for batch in global_batches(10, 4, seed, epoch) for index in batch]
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert all(sorted(order) == list(range(10)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    assert [len(batch) for batch in global_batches(10, 4, 0, 0)] == [4, 4, 2]


def test_targets_are_the_response_tokens(tokenizer):
    examples = [
        make_example(tokenizer, conversation)
        for conversation in (CONVERSATION, CONVERSATION[-2:], CONVERSATION[:3])
    ]
    batches = list(micro_batches(examples, rows=2))
    assert [batch.input_ids.shape[0] for batch in batches] == [2, 1]
    responses = [list(each.token_ids[each.num_prompt_tokens :]) for each in examples]
    targets = [token for batch in batches for token in batch.targets.tolist()]
    assert sorted(targets) == sorted(token for response in responses for token in response)
    for batch in batches:
        flat = batch.input_ids.flatten()
        assert torch.equal(flat[batch.source_index + 1], batch.targets)
        width = batch.input_ids.shape[1]
        assert torch.equal(batch.source_index // width, (batch.source_index + 1) // width)
