"""Messages to token ids by the checkpoint's own chat template, with exactly one BOS."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stages.contract.errors import UserError

Messages = Sequence[Mapping[str, str]]


def require_chat_template(tokenizer: Any, place: str) -> None:
    """Checks that ``tokenizer`` can render messages."""
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {place} has no chat template",
            "use an instruction-tuned checkpoint, or save one with tokenizer.chat_template set",
        )


def check_template_args(tokenizer: Any, names: Iterable[str]) -> None:
    """Checks that variables for the chat template are not options of the rendering itself."""
    options = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    for name in sorted(options.difference({"tools", "documents"}).intersection(names)):
        raise UserError(
            f"chat_template_args has {name!r}, which says how to render, not what",
            "leave it out; chat_template_args are variables of the template "
            "(`enable_thinking: false`)",
        )


def with_system_prompt(messages: Messages, system_prompt: str) -> Messages:
    """``messages`` with a system turn in front if they open with none of their own."""
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def render_prompt(
    tokenizer: Any,
    messages: Messages,
    *,
    system_prompt: str = "",
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids after which the model's next token is the first of its response.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The conversation so far; needs a user turn.
        system_prompt: Put in front if the conversation opens with no system turn of its own.
        template_args: Variables for the template.

    Raises:
        UserError: There is no user turn, the template refuses the messages, or it doubles the BOS.
    """
    if not any(message["role"] == "user" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise UserError(f"a prompt has no user turn (its roles: {roles})", "add a user message")
    messages = with_system_prompt(messages, system_prompt)
    return _render(tokenizer, messages, add_generation_prompt=True, **(template_args or {}))


def render_conversation(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of a whole conversation, as a reward model reads it."""
    return _render(tokenizer, messages, add_generation_prompt=False)


def _render(tokenizer: Any, messages: Messages, **template_args: Any) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **template_args
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
