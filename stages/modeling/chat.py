"""Messages to token ids by the checkpoint's own chat template, with exactly one BOS."""

import datetime
import inspect
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from stages.contract.errors import UserError

Messages = Sequence[Mapping[str, str]]
# Time limit for one prompt's rendering, which takes a millisecond.
_LIMIT_SECONDS = 5
# Templates that ask for the date get this one, so that a key's prompts are the same on every day.
# Llama 3.2's template falls back on it by itself.
_DAY = datetime.datetime(2024, 7, 26)


def require_chat_template(tokenizer: Any, place: str) -> None:
    """Checks that ``tokenizer`` has a chat template, which renders what messages say.

    Raises:
        UserError: It has none, or renders two prompts alike.
    """
    remedy = "use an instruction-tuned checkpoint, or save one with tokenizer.chat_template set"
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {place} has no chat template", remedy)
    if len({_text(tokenizer, [{"role": "user", "content": each}]) for each in "12"}) == 1:
        raise UserError(
            f"{place}: the chat template renders two prompts alike: it leaves out what they say",
            remedy,
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

    A system prompt is put in front of messages that open with no system turn of their own.

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


def render_answered(
    tokenizer: Any,
    messages: Messages,
    answer: str,
    *,
    system_prompt: str = "",
    template_args: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its answer; the prompt's are those of :func:`render_prompt`.

    Raises:
        UserError: The chat template refuses the conversation, or renders it in a way that does not
            continue the prompt.
    """
    arguments = template_args or {}
    messages = with_system_prompt(messages, system_prompt)
    prompt = render_prompt(tokenizer, messages, template_args=arguments)
    answered = [*messages, {"role": "assistant", "content": answer}]
    whole = _render(tokenizer, answered, add_generation_prompt=False, **arguments)
    if prompt and whole[: len(prompt)] == prompt and len(whole) > len(prompt):
        return prompt, _until_last_eos(tokenizer, whole[len(prompt) :])
    # A tokenizer may merge the prompt's last newline with newlines that the answer opens with.
    before = _text(tokenizer, messages, add_generation_prompt=True, **arguments)
    after = _text(tokenizer, answered, add_generation_prompt=False, **arguments)
    if not prompt or not after.startswith(before) or after == before:
        raise UserError(
            "the chat template does not continue a prompt with the answer: the text of a "
            "conversation does not begin with that of its prompt",
            "use a chat template whose generation prompt is the beginning of an assistant turn",
        )
    own = tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
    return prompt, _until_last_eos(tokenizer, own)


def _until_last_eos(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Cuts what a template writes after the answer's end: sampling stops there."""
    for index in range(len(token_ids) - 1, -1, -1):
        if token_ids[index] == tokenizer.eos_token_id:
            return token_ids[: index + 1]
    return token_ids


def _render(tokenizer: Any, messages: Messages, **template_args: Any) -> list[int]:
    text = _text(tokenizer, messages, **template_args)
    return with_one_bos(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(tokenizer: Any, messages: Messages, **template_args: Any) -> str:
    try:
        with _time_limit():
            return tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                strftime_now=_DAY.strftime,
                **template_args,
            )
    except Exception as error:
        # A template is a program: besides refusing, it may divide by nothing or never end.
        raise UserError(
            f"the chat template refuses a prompt with roles "
            f"{', '.join(message['role'] for message in messages)}: {error} (tokenizer of "
            f"{tokenizer.name_or_path or 'the new model'})",
            "correct the template, or the prompt's roles (some templates know no system turn)",
        ) from error


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raises ``TimeoutError`` in a block that takes too long; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"it took more than {_LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
