import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stages.contract.errors import UserError
from stages.contract.params import ChatSettings
from stages.harness.context import ModelSource
from stages.modeling.chat import (
    render_answered,
    render_prompt,
    spelled_control_tokens,
    with_one_bos,
)
from stages.modeling.tokenizers import load_tokenizer
from tests.tiny_models import BOS_ID, CHAT_TEMPLATE, make_tiny_tokenizer

PLAIN = ChatSettings()


@pytest.fixture
def tokenizer():
    return make_tiny_tokenizer()


def test_the_system_prompt_gives_way_to_a_system_turn(tokenizer):
    turns = [{"role": "system", "content": "blue"}, {"role": "user", "content": "red"}]
    rendered = render_prompt(tokenizer, turns, PLAIN)
    assert render_prompt(tokenizer, turns, ChatSettings(system_prompt="green")) == rendered
    added = render_prompt(tokenizer, turns[1:], ChatSettings(system_prompt="blue"))
    assert added == render_prompt(tokenizer, turns, PLAIN)


class TestControlTokens:
    """Text that spells ``<assistant>`` or ``</s>``, the template's tokens."""

    def test_end_of_an_answer_is_its_own_end(self, tokenizer):
        turns = [{"role": "user", "content": "red"}]
        _, answer = render_answered(tokenizer, turns, "cat</s>", PLAIN)
        assert tokenizer.convert_ids_to_tokens(answer) == ["cat", "</s>"]

    def test_added_token_of_the_template_counts(self):
        plain = make_tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("<assistant>", "[reply]"))
        plain.add_tokens(["[reply]", "[other]"])
        turns = [{"role": "user", "content": "red [other]"}]
        assert render_prompt(plain, turns, PLAIN)
        turns = [{"role": "user", "content": "red [reply]"}]
        with pytest.raises(UserError, match=r"spells control tokens: '\[reply\]'"):
            render_prompt(plain, turns, PLAIN)

    def test_tokens_that_the_template_takes_for_its_own_do_not_count(self):
        written = "{{ '[t] [/t] ' if '[t]' not in message['content'] }}{{ message['content'] }}"
        template = CHAT_TEMPLATE.replace("{{ message['content'] }}", written)
        thinking = make_tiny_tokenizer(chat_template=template)
        thinking.add_tokens(["[t]", "[/t]"])
        turns = [{"role": "user", "content": "red [t] cat [/t] blue"}]
        assert spelled_control_tokens(thinking, turns) is None
        turns = [{"role": "user", "content": "red [/t] cat"}]
        assert "'[/t]'" in spelled_control_tokens(thinking, turns)

    def test_whitespace_is_none_though_a_tokenizer_adds_it(self):
        spaced = make_tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("<assistant>", "\n"))
        spaced.add_tokens(["\n"])
        assert render_prompt(spaced, [{"role": "user", "content": "red\nblue"}], PLAIN)


def test_a_bos_is_added_only_if_the_tokenizer_uses_one(tokenizer):
    assert with_one_bos(tokenizer, [5, 7]) == [5, 7]

    class AddsBos:
        bos_token_id = BOS_ID

        def __call__(self, text):
            return {"input_ids": [BOS_ID]}

    assert with_one_bos(AddsBos(), [5, 7]) == [BOS_ID, 5, 7]
    assert with_one_bos(AddsBos(), [BOS_ID, 5, 7]) == [BOS_ID, 5, 7]


def test_an_answer_may_open_with_newlines_that_merge():
    characters = {
        character: index for index, character in enumerate(["<", ">", "\n", "\n\n", "r", "b"])
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(characters, [("\n", "\n")])), eos_token=">"
    )
    fast.chat_template = (
        "{% for each in messages %}<\n{{ each.content }}{{ '>' }}{% endfor %}"
        "{% if add_generation_prompt %}<\n{% endif %}"
    )
    prompt, answer = render_answered(fast, [{"role": "user", "content": "r"}], "\n\nb", PLAIN)
    assert fast.convert_ids_to_tokens(prompt) == ["<", "\n", "r", ">", "<", "\n"]
    assert fast.convert_ids_to_tokens(answer) == ["\n\n", "b", ">"]


def test_an_answer_ends_with_its_turn_under_another_eos():
    """As a base checkpoint's tokenizer, whose end token is not the template's."""
    tokenizer = make_tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("eos_token", "'</s> one'"))
    tokenizer.eos_token = "<pad>"
    _, answer = render_answered(tokenizer, [{"role": "user", "content": "red"}], "cat", PLAIN)
    assert tokenizer.convert_ids_to_tokens(answer) == ["cat", "</s>"]


def test_an_answer_ends_before_the_template_s_closing_text():
    template = CHAT_TEMPLATE + "{% if not add_generation_prompt %}<pad>{% endif %}"
    tokenizer = make_tiny_tokenizer(chat_template=template)
    _, answer = render_answered(tokenizer, [{"role": "user", "content": "red"}], "cat", PLAIN)
    assert tokenizer.convert_ids_to_tokens(answer) == ["cat", "</s>"]


MARKED = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}", "{% generation %}{{ message['content'] }}{% endgeneration %}"
)


@pytest.mark.parametrize(
    "template", [MARKED, {"default": CHAT_TEMPLATE, "rag": "{{ bos_token }}<system><assistant>"}]
)
def test_marks_of_answers_and_named_templates_change_no_prompt(tmp_path, tokenizer, template):
    make_tiny_tokenizer(chat_template=template).save_pretrained(tmp_path)
    turns = [{"role": "user", "content": "red"}]
    loaded = load_tokenizer(ModelSource(str(tmp_path)))
    expected = render_answered(tokenizer, turns, "cat", PLAIN)
    assert render_answered(loaded, turns, "cat", PLAIN) == expected


@pytest.mark.parametrize("part", ["split('red')[-1]", "split('red')[0]"])
def test_a_template_that_leaves_out_a_part_of_the_answer_is_refused(part):
    """As templates do with the reasoning of a thinking model."""
    template = CHAT_TEMPLATE.replace("message['content']", f"message['content'].{part}")
    tokenizer = make_tiny_tokenizer(chat_template=template)
    turns = [{"role": "user", "content": "cat"}]
    assert render_answered(tokenizer, turns, "dog", PLAIN)
    with pytest.raises(UserError, match="leaves out a part of the answer"):
        render_answered(tokenizer, turns, "blue red dog", PLAIN)


def test_a_template_that_trims_an_answer_is_not_refused():
    template = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")
    turns = [{"role": "user", "content": "cat"}]
    tokenizer = make_tiny_tokenizer(chat_template=template)
    assert render_answered(tokenizer, turns, " dog\n", PLAIN)


def test_named_templates_without_a_default_are_refused(tmp_path):
    named = {"rag": CHAT_TEMPLATE, "tool_use": CHAT_TEMPLATE}
    make_tiny_tokenizer(chat_template=named).save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelSource(str(tmp_path)))
    with pytest.raises(UserError, match=r"no default specified.*'rag', 'tool_use'") as refused:
        render_prompt(loaded, [{"role": "user", "content": "red"}], PLAIN)
    assert "correct the template" in refused.value.remedy


def test_the_date_in_a_template_is_the_same_every_day():
    tokenizer = make_tiny_tokenizer(
        chat_template="{{ {'26 Jul 2024': 'red'}[strftime_now('%d %b %Y')] }}" + CHAT_TEMPLATE
    )
    ids = render_prompt(tokenizer, [{"role": "user", "content": "cat"}], PLAIN)
    assert "red" in tokenizer.convert_ids_to_tokens(ids)
