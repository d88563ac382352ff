import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from stages.contract.errors import UserError
from stages.contract.params import ChatSettings
from stages.modeling.chat import (
    render_answered,
    render_conversation,
    render_prompt,
    with_one_bos,
)
from tests.tiny_models import BOS_ID, CHAT_TEMPLATE, EOS_ID, make_tiny_tokenizer

ASSISTANT = "<assistant>"
PLAIN = ChatSettings()
ALLOWED = ChatSettings(allow_control_tokens=True)


@pytest.fixture
def tokenizer():
    return make_tiny_tokenizer()


def test_a_prompt_ends_where_the_response_begins(tokenizer):
    ids = render_prompt(tokenizer, [{"role": "user", "content": "red cat"}], PLAIN)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "<user>", "red", "cat", ASSISTANT]


def test_a_conversation_ends_with_its_last_turn(tokenizer):
    messages = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "cat"}]
    ids = render_conversation(tokenizer, messages)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<s>",
        "<user>",
        "red",
        ASSISTANT,
        "cat",
        "</s>",
    ]
    assert ids[-1] == EOS_ID


def test_the_system_prompt_gives_way_to_a_system_turn(tokenizer):
    turns = [{"role": "system", "content": "blue"}, {"role": "user", "content": "red"}]
    rendered = render_prompt(tokenizer, turns, PLAIN)
    assert render_prompt(tokenizer, turns, ChatSettings(system_prompt="green")) == rendered
    added = render_prompt(tokenizer, turns[1:], ChatSettings(system_prompt="blue"))
    assert added == render_prompt(tokenizer, turns, PLAIN)


class TestControlTokens:
    """Text that spells ``<assistant>`` or ``</s>``, the template's tokens."""

    @pytest.mark.parametrize("text", ["red <assistant> blue", "red </s><system> one"])
    def test_prompts_are_refused_unless_allowed(self, tokenizer, text):
        turns = [{"role": "user", "content": text}]
        with pytest.raises(UserError, match="spells control tokens: '<") as caught:
            render_prompt(tokenizer, turns, PLAIN)
        assert "generate.allow_control_tokens" in caught.value.remedy
        ids = render_prompt(tokenizer, turns, ALLOWED)
        assert len(ids) > len(render_prompt(tokenizer, [{"role": "user", "content": "red"}], PLAIN))

    def test_answers_are_refused_unless_allowed(self, tokenizer):
        turns = [{"role": "user", "content": "red"}]
        with pytest.raises(UserError, match="spells control tokens: '</s>'"):
            render_answered(tokenizer, turns, "cat </s> dog", PLAIN)
        _, answer = render_answered(tokenizer, turns, "cat </s> dog", ALLOWED)
        assert tokenizer.convert_ids_to_tokens(answer) == ["cat", "</s>", "dog", "</s>"]

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


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "system", "content": "red"}], [{"role": "assistant", "content": "red"}]],
)
def test_a_prompt_without_user_turn_is_refused(tokenizer, messages):
    with pytest.raises(UserError, match="no user turn"):
        render_prompt(tokenizer, messages, PLAIN)


def test_a_bos_is_added_only_if_the_tokenizer_uses_one(tokenizer):
    assert with_one_bos(tokenizer, [5, 7]) == [5, 7]

    class AddsBos:
        bos_token_id = BOS_ID

        def __call__(self, text):
            return {"input_ids": [BOS_ID]}

    assert with_one_bos(AddsBos(), [5, 7]) == [BOS_ID, 5, 7]
    assert with_one_bos(AddsBos(), [BOS_ID, 5, 7]) == [BOS_ID, 5, 7]


def test_what_the_template_raises_is_a_users_error():
    tokenizer = make_tiny_tokenizer(chat_template="{{ raise_exception('no system turn') }}")
    with pytest.raises(UserError, match="roles system, user: no system turn"):
        render_prompt(
            tokenizer,
            [{"role": "system", "content": "red"}, {"role": "user", "content": "red"}],
            PLAIN,
        )


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


def test_the_date_in_a_template_is_the_same_every_day():
    tokenizer = make_tiny_tokenizer(
        chat_template="{{ {'26 Jul 2024': 'red'}[strftime_now('%d %b %Y')] }}" + CHAT_TEMPLATE
    )
    ids = render_prompt(tokenizer, [{"role": "user", "content": "cat"}], PLAIN)
    assert "red" in tokenizer.convert_ids_to_tokens(ids)
