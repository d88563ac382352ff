import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from stages.sft.data import make_word_tokenizer

TEXT = "Gladly, two towels for room 12.  Is that all?\nYes — it's (nearly) all!"


@pytest.fixture
def tokenizer():
    return make_word_tokenizer([TEXT, "Is that all?"], max_length=64)


def test_text_of_known_words_comes_back_as_it_was(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == TEXT


def test_an_unknown_word_is_the_unknown_token(tokenizer):
    ids = tokenizer("Gladly, nine towels")["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 1


def test_vocabulary_does_not_depend_on_the_order_of_the_texts():
    texts = ["one two", "three one", "two four"]
    first, second = (make_word_tokenizer(corpus, max_length=8) for corpus in (texts, texts[::-1]))
    assert first.get_vocab() == second.get_vocab()


def test_conversations_have_one_bos_and_an_end_after_each_answer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
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
    assert [ids.count(token_id) for token_id in (loaded.bos_token_id, loaded.eos_token_id)] == [
        1,
        1,
    ]
    assert loaded.decode(ids, skip_special_tokens=True) == "Is that all?YesGladly, two towels"


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(TemplateError, match="tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "two"}], tokenize=False)
