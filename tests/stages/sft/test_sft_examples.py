import pytest

from stages.contract.errors import UserError
from stages.modeling.chat import render_prompt
from stages.sft.data import make_example, make_examples, make_word_tokenizer
from stages.sft.params import SftParams
from tests.tiny_models import CHAT_TEMPLATE, make_tiny_tokenizer

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
    example = make_example(tokenizer, CONVERSATION, SftParams())
    prompt = render_prompt(tokenizer, CONVERSATION[:-1], SftParams())
    assert example.prompt.tolist() == prompt
    response = tokenizer.convert_ids_to_tokens(example.response.tolist())
    assert response == ["blue", "bird", "runs", "</s>"]
    assert example.loss_terms == 4


def test_what_a_template_writes_after_the_end_is_cut():
    template = make_word_tokenizer(["one"], max_length=8).chat_template
    tokenizer = make_tiny_tokenizer(
        chat_template=template.replace("eos_token", "eos_token + 'one'")
    )
    example = make_example(tokenizer, CONVERSATION[-2:], SftParams())
    assert example.response[-1] == tokenizer.eos_token_id


def test_a_template_that_opens_with_reasoning_takes_an_argument():
    template = CHAT_TEMPLATE.replace(
        "<assistant>{% endif %}",
        "<assistant> {{ 'one' if enable_thinking is not defined }}{% endif %}",
    )
    tokenizer = make_tiny_tokenizer(chat_template=template)
    with pytest.raises(UserError, match="does not continue a prompt") as caught:
        make_example(tokenizer, CONVERSATION, SftParams())
    assert "chat_template_args: {enable_thinking: false}" in caught.value.remedy
    reasoned = [CONVERSATION[3], {"role": "assistant", "content": "one blue"}]
    answer = make_example(tokenizer, reasoned, SftParams()).response.tolist()
    assert tokenizer.convert_ids_to_tokens(answer) == ["blue", "</s>"]
    params = SftParams(chat_template_args={"enable_thinking": False})
    example = make_example(tokenizer, CONVERSATION, params)
    assert tokenizer.convert_ids_to_tokens(example.response.tolist())[0] == "blue"


def test_text_that_spells_control_tokens_is_allowed_by_the_setting(tokenizer):
    conversation = [CONVERSATION[1], {"role": "assistant", "content": "red </s> blue"}]
    with pytest.raises(UserError, match="spells control tokens"):
        make_example(tokenizer, conversation, SftParams())
    example = make_example(tokenizer, conversation, SftParams(allow_control_tokens=True))
    assert example.loss_terms == 4


def test_a_conversation_that_the_template_refuses_is_named():
    template = "{{ raise_exception('no') if messages[0].role == 'system' else 'one' }}"
    tokenizer = make_tiny_tokenizer(chat_template=template + "{{ messages[-1].content }}")
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: the chat template refuses"):
        make_examples(tokenizer, [("a.jsonl, line 3", CONVERSATION)], SftParams(), 99)


def test_long_conversations_are_left_out_and_counted(tokenizer):
    length = make_example(tokenizer, CONVERSATION, SftParams()).row_tokens
    long, short = ("a", CONVERSATION), ("b", CONVERSATION[-2:])
    examples, num_dropped = make_examples(tokenizer, [long, short, long], SftParams(), length)
    assert (len(examples), num_dropped) == (3, 0)
    examples, num_dropped = make_examples(tokenizer, [long, short], SftParams(), length - 1)
    assert (len(examples), num_dropped) == (1, 1)
    with pytest.raises(UserError, match="all 1 conversations are longer than"):
        make_examples(tokenizer, [long], SftParams(), length - 1)
