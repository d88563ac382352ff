"""Messages to token ids by the checkpoint's own chat template, with exactly one BOS."""

import datetime
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stages.contract.errors import UserError
from stages.contract.messages import Messages, with_system
from stages.contract.params import ChatSettings
from stages.harness.context import ModelSource
from stages.modeling.tokenizers import load_tokenizer

# Templates that ask for the date get this one, so that a key's prompts are the same on every day.
# Llama 3.2's template falls back on it by itself.
_DAY = datetime.datetime(2024, 7, 26)
# An answer that no template writes by itself.
_ANSWER = "Q7Z"


def require_chat_template(tokenizer: Any, place: str) -> None:
    """Checks that ``tokenizer`` has a chat template, which renders what messages say.

    Raises:
        UserError: It has none, or renders two prompts alike.
    """
    remedy = "use an instruction-tuned checkpoint, or save one with tokenizer.chat_template set"
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {place} has no chat template", remedy)
    if len({_text(tokenizer, [{"role": "user", "content": text}]) for text in "12"}) == 1:
        raise UserError(
            f"{place}: the chat template renders two prompts alike: it leaves out what they say",
            remedy,
        )


def load_chat_tokenizer(source: ModelSource) -> Any:
    """Loads a checkpoint's tokenizer, whose chat template is checked."""
    tokenizer = load_tokenizer(source)
    require_chat_template(tokenizer, source.name_or_path)
    return tokenizer


def render_prompt(tokenizer: Any, messages: Messages, settings: ChatSettings) -> list[int]:
    """Token ids after which the model's next token is the first of its response.

    A system prompt is put in front of messages that open without a system turn.

    Raises:
        UserError: A user turn is missing, the template refuses the messages, it doubles the BOS, or
            a text spells control tokens.
    """
    if not any(message["role"] == "user" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise UserError(f"a prompt has no user turn (its roles: {roles})", "add a user message")
    messages = with_system(messages, settings.system_prompt)
    return _render_checked(tokenizer, messages, settings, add_generation_prompt=True)


def spelled_control_tokens(tokenizer: Any, messages: Messages, **template_args: Any) -> str | None:
    """Message that names the control tokens (``<|im_end|>``) in texts; None if there are none.

    A control token is special, or one that the template writes: the turns then hold more of it than
    the same turns with a neutral text.
    """
    text = "\n".join(turn["content"] for turn in messages)
    added = tokenizer.added_tokens_decoder.items()
    # Some tokenizers have their whitespace among the added tokens.
    spelled = {
        number: token for number, token in added if token.content.strip() and token.content in text
    }
    if not spelled:
        return None
    neutral = [{**turn, "content": "a"} for turn in messages]
    written = Counter(render_conversation(tokenizer, neutral, **template_args))
    # A template takes <think>…</think> of an answer for its own.
    rendered = Counter(render_conversation(tokenizer, messages, **template_args))
    names = [
        repr(token.content)
        for number, token in spelled.items()
        if token.special or 0 < written[number] < rendered[number]
    ]
    return f"the text spells control tokens: {', '.join(names)}" if names else None


def render_answered(
    tokenizer: Any, messages: Messages, answer: str, settings: ChatSettings
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its answer; the prompt's are as in :func:`render_prompt`.

    An end token that the answer spells at its end is the template's own.

    Raises:
        UserError: The chat template refuses the conversation, or renders it in a way that does not
            continue the prompt, or a text spells control tokens.
    """
    arguments = settings.chat_template_args
    prompt = render_prompt(tokenizer, messages, settings)
    messages = with_system(messages, settings.system_prompt)
    answer = answer.removesuffix(tokenizer.eos_token or "")
    answered = [*messages, {"role": "assistant", "content": answer}]
    whole = _render_checked(tokenizer, answered, settings, add_generation_prompt=False)
    if _squeezed(answer) not in _squeezed(_text(tokenizer, answered, **arguments)):
        raise UserError(
            "the chat template leaves out a part of the answer, as many do with <think>…</think>",
            "use a chat template that writes the whole answer, or remove that part from the data",
        )
    if prompt and whole[: len(prompt)] == prompt and len(whole) > len(prompt):
        return prompt, _until_end(tokenizer, whole[len(prompt) :], arguments)
    # A tokenizer may merge the prompt's last newline with newlines that the answer opens with.
    before = _text(tokenizer, messages, **arguments | {"add_generation_prompt": True})
    after = _text(tokenizer, answered, **arguments | {"add_generation_prompt": False})
    if not prompt or not after.startswith(before) or after == before:
        raise UserError(
            "the chat template does not continue a prompt with the answer: a "
            "conversation's text does not begin with its prompt's",
            "use a chat template whose generation prompt is the beginning of an assistant turn; "
            "for one that opens <think>, set generate.chat_template_args: {enable_thinking: false}",
        )
    answer_ids = tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
    return prompt, _until_end(tokenizer, answer_ids, arguments)


def _squeezed(text: str) -> str:
    """A text without white space, which templates add and take away."""
    return "".join(text.split())


def _until_end(tokenizer: Any, token_ids: list[int], template_args: Mapping[str, Any]) -> list[int]:
    """Cuts what a template writes after the answer's end: sampling stops there."""
    end = _end_of_turn(tokenizer, json.dumps(dict(template_args)))
    if end not in token_ids:
        return token_ids
    return token_ids[: len(token_ids) - token_ids[::-1].index(end)]


@functools.lru_cache
def _end_of_turn(tokenizer: Any, template_args: str) -> int | None:
    """The first special token that the template writes after an answer; None if it writes none."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    text = _text(tokenizer, turns, **json.loads(template_args))
    after = tokenizer(text.rpartition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder.items()
    special = {number for number, token in added if token.special} - {tokenizer.unk_token_id}
    ends = {*special, tokenizer.eos_token_id}
    return next((number for number in after if number in ends), None)


def _render_checked(
    tokenizer: Any, messages: Messages, settings: ChatSettings, **template_args: Any
) -> list[int]:
    spelled = spelled_control_tokens(tokenizer, messages, **template_args)
    if spelled and not settings.allow_control_tokens:
        remedy = "remove them from the text, or set generate.allow_control_tokens to true"
        raise UserError(spelled, remedy)
    return render_conversation(tokenizer, messages, **settings.chat_template_args | template_args)


def render_conversation(tokenizer: Any, messages: Messages, **template_args: Any) -> list[int]:
    """Token ids of a whole conversation."""
    text = _text(tokenizer, messages, **template_args)
    return with_one_bos(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: Any, messages: Messages, **template_args: Any) -> str:
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            strftime_now=_DAY.strftime,
            **template_args,
        )
    except Exception as error:
        # A template is a program: besides refusing, it may divide by nothing.
        raise UserError(
            f"the chat template refuses a prompt with roles "
            f"{', '.join(message['role'] for message in messages)}: {error} (tokenizer of "
            f"{tokenizer.name_or_path or 'the new model'})",
            "correct the template, or the prompt's roles (some templates know no system turn)",
        ) from error


def with_one_bos(tokenizer: Any, token_ids: Sequence[int]) -> list[int]:
    """``token_ids`` as the model expects them: one BOS if its tokenizer uses one.

    Templates of models that need a BOS write it themselves or leave it to the tokenizer; here it is
    added if it is missing and a doubled one, which shifts every reward and log-probability, is
    refused.
    """
    ids = list(token_ids)
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    if ids[:2] == [bos, bos]:
        raise UserError(
            f"the chat template gives a doubled BOS token ({tokenizer.bos_token!r})",
            "remove one of the two from the tokenizer's chat template",
        )
    if ids[:1] != [bos] and tokenizer("")["input_ids"][:1] == [bos]:
        return [bos, *ids]
    return ids
