"""From conversations to token ids and batches.

Shapes: ``R`` rows of a micro-batch, ``T`` tokens of its longest row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.modeling.chat import render_conversation, render_prompt
from stages.sft.conversations import Conversation

# Of transformers' loss functions: a label that does not count.
IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One conversation in tokens.

    Attributes:
        token_ids: The whole of it; 4 bytes a token, so that large data sets fit in memory.
        num_prompt_tokens: How many of them come before the response, the only part with a loss.
    """

    token_ids: array[int]
    num_prompt_tokens: int

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_response_tokens(self) -> int:
        """Tokens that count in the loss."""
        return len(self) - self.num_prompt_tokens


def make_example(tokenizer: Any, conversation: Conversation) -> Example:
    """Renders a conversation; the prompt has exactly the ids that sampling will start from.

    Raises:
        UserError: The chat template refuses the conversation, or renders it in a way that does not
            continue the prompt.
    """
    prompt = render_prompt(tokenizer, conversation[:-1])
    whole = render_conversation(tokenizer, conversation)
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        raise UserError(
            "the chat template does not continue a prompt with the answer: the tokens of a "
            "conversation do not begin with those of its prompt",
            "use a chat template whose generation prompt is the beginning of an assistant turn",
        )
    return Example(array("i", _until_last_eos(tokenizer, whole, len(prompt))), len(prompt))


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
    for conversation in conversations:
        example = make_example(tokenizer, conversation)
        if len(example) <= max_length:
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


def global_batches(
    num_examples: int, batch_rows: int, seed: int, epoch: int
) -> Iterator[list[int]]:
    """Yields the indices of each step's examples: one epoch in an order of its own."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    order = torch.randperm(num_examples, generator=generator).tolist()
    for start in range(0, num_examples, batch_rows):
        yield order[start : start + batch_rows]


def micro_batches(examples: Sequence[Example], rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ``input_ids`` and ``labels``, both [R, T], of at most ``rows`` examples each.

    Examples of like length go together. Rows are padded on the right with token 0: under a causal
    mask no real token sees the padding.
    """
    ordered = sorted(examples, key=len)
    for start in range(0, len(ordered), rows):
        chosen = ordered[start : start + rows]
        input_ids = torch.zeros(len(chosen), len(chosen[-1]), dtype=torch.long)
        labels = torch.full_like(input_ids, IGNORED)
        for row, example in enumerate(chosen):
            ids = torch.tensor(example.token_ids)
            input_ids[row, : len(ids)] = ids
            labels[row, example.num_prompt_tokens : len(ids)] = ids[example.num_prompt_tokens :]
        yield input_ids, labels
