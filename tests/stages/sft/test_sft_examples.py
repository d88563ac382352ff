import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

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


TEXT = "Gladly, two towels for room 12.  Is that all?\nYes — it's (nearly) all!"


@pytest.fixture
def word_tokenizer():
    return make_word_tokenizer([TEXT, "Is that all?"], max_length=64)


def test_text_of_known_words_comes_back_as_it_was(word_tokenizer):
    ids = word_tokenizer(TEXT)["input_ids"]
    assert word_tokenizer.unk_token_id not in ids
    assert word_tokenizer.decode(ids) == TEXT


def test_an_unknown_word_is_the_unknown_token(word_tokenizer):
    ids = word_tokenizer("Gladly, nine towels")["input_ids"]
    assert ids.count(word_tokenizer.unk_token_id) == 1


def test_vocabulary_does_not_depend_on_the_order_of_the_texts():
    texts = ["one two", "three one", "two four"]
    first, second = (make_word_tokenizer(corpus, max_length=8) for corpus in (texts, texts[::-1]))
    assert first.get_vocab() == second.get_vocab()


def test_conversations_have_one_bos_and_an_end_after_each_answer(word_tokenizer, tmp_path):
    word_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "user", "content": "Is that all?"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "Gladly, two towels"},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        text == "<s><|user|>Is that all?<|assistant|>Yes</s><|user|>Gladly, two towels<|assistant|>"
    )
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert ids.count(loaded.bos_token_id) == 1
    assert ids.count(loaded.eos_token_id) == 1
    assert loaded.decode(ids, skip_special_tokens=True) == "Is that all?YesGladly, two towels"


def test_an_unknown_role_is_refused(word_tokenizer):
    with pytest.raises(TemplateError, match="tool"):
        word_tokenizer.apply_chat_template([{"role": "tool", "content": "two"}], tokenize=False)
