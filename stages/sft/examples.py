"""Conversations as token ids: a prompt, and the answer that has a loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.contract.errors import UserError
from stages.modeling.chat import render_conversation, render_prompt
from stages.sft.conversations import Conversation
from stages.training.rows import IntArray, Sample


@dataclass(frozen=True)
class Example(Sample):
    """One conversation in tokens, 4 bytes each.

    Attributes:
        prompt: All that comes before the answer.
        response: The answer, the only part with a loss.
    """

    prompt: IntArray
    response: IntArray

    @property
    def responses(self) -> tuple[IntArray, ...]:
        """The answer."""
        return (self.response,)

    @property
    def loss_terms(self) -> int:
        """Tokens of the answer: the loss is a mean over tokens."""
        return len(self.response)


def make_example(tokenizer: Any, conversation: Conversation) -> Example:
    """Renders a conversation; the prompt has exactly the ids that sampling will start from.

    Raises:
        UserError: The chat template refuses the conversation, or renders it in a way that does not
            continue the prompt.
    """
    prompt = render_prompt(tokenizer, conversation[:-1])
    whole = render_conversation(tokenizer, conversation)
    if not prompt or whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        raise UserError(
            "the chat template does not continue a prompt with the answer: the tokens of a "
            "conversation do not begin with those of its prompt",
            "use a chat template whose generation prompt is the beginning of an assistant turn",
        )
    whole = _until_last_eos(tokenizer, whole, len(prompt))
    return Example(*(np.array(part, np.int32) for part in (prompt, whole[len(prompt) :])))


def _until_last_eos(tokenizer: Any, token_ids: list[int], num_prompt_tokens: int) -> list[int]:
    """Cuts what a template writes after the answer's end: sampling stops there."""
    for index in range(len(token_ids) - 1, num_prompt_tokens - 1, -1):
        if token_ids[index] == tokenizer.eos_token_id:
            return token_ids[: index + 1]
    return token_ids


def make_examples(
    tokenizer: Any, conversations: Iterable[Conversation], max_length: int
) -> tuple[list[Example], int]:
    """Renders conversations of at most ``max_length`` tokens, and counts those that do not fit.

    Raises:
        UserError: There are none, or none fits.
    """
    examples = []
    num_dropped = 0
    for number, conversation in enumerate(conversations, 1):
        try:
            example = make_example(tokenizer, conversation)
        except UserError as error:
            raise error.at(f"conversation {number} of the data") from error
        if example.num_tokens <= max_length:
            examples.append(example)
        else:
            num_dropped += 1
    if not examples:
        raise UserError(
            f"all {num_dropped} conversations are longer than {max_length} tokens"
            if num_dropped
            else "the data has no conversations",
            "raise sft.max_length_tokens" if num_dropped else "check the data files",
        )
    return examples, num_dropped
