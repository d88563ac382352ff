"""Messages to token ids by the checkpoint's own chat template, with exactly one BOS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.contract.errors import UserError

Messages = Sequence[Mapping[str, str]]


def require_chat_template(tokenizer: Any, place: str) -> None:
    """Checks that ``tokenizer`` can render messages.

    Args:
        tokenizer: The tokenizer.
        place: The checkpoint it came from, for the message.

    Raises:
        UserError: It has no chat template.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {place} has no chat template",
            "use an instruction-tuned checkpoint, or save one with tokenizer.chat_template set",
        )


def render_prompt(tokenizer: Any, messages: Messages, *, system_prompt: str = "") -> list[int]:
    """Token ids after which the model's next token is the first of its response.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The conversation so far; needs a user turn.
        system_prompt: Put in front where the conversation opens with no system turn of its own.

    Raises:
        UserError: There is no user turn, the template refuses the messages, or it doubles the BOS.
    """
    if not any(message["role"] == "user" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise UserError(f"a prompt has no user turn (its roles: {roles})", "add a user message")
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return _render(tokenizer, messages, add_generation_prompt=True)


def render_conversation(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of a whole conversation, as a reward model reads it.

    Raises:
        UserError: The template refuses the messages, or doubles the BOS.
    """
    return _render(tokenizer, messages, add_generation_prompt=False)


def _render(tokenizer: Any, messages: Messages, *, add_generation_prompt: bool) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except TemplateError as error:
        raise UserError(
            f"the chat template refuses a prompt with roles "
            f"{', '.join(message['role'] for message in messages)}: {error}",
            "check the prompt's roles against the template (some know no system turn)",
        ) from error
    return with_one_bos(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def with_one_bos(tokenizer: Any, token_ids: Sequence[int]) -> list[int]:
    """``token_ids`` as the model expects them: one BOS where its tokenizer uses one.

    Templates of models that need a BOS write it themselves or leave it to the tokenizer; here it is
    added where it is missing and a doubled one, which shifts every reward and log-probability, is
    refused.

    Raises:
        UserError: ``token_ids`` open with more than one BOS.
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
