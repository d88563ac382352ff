"""From conversations to token ids and batches.

Shapes: ``R`` rows of a micro-batch, ``T`` tokens of its longest row, ``N`` response tokens in it.
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
    if not prompt or whole[: len(prompt)] != prompt or len(whole) == len(prompt):
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


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        input_ids: [R, T], padded on the right: under a causal mask no real token sees the padding.
        source_index: [N], places in the flattened rows whose output predicts a response token.
        targets: [N], those tokens.
    """

    input_ids: Tensor
    source_index: Tensor
    targets: Tensor


def micro_batches(examples: Sequence[Example], rows: int) -> Iterator[MicroBatch]:
    """Yields micro-batches of at most ``rows`` examples; those of like length go together."""
    ordered = sorted(examples, key=len)
    for start in range(0, len(ordered), rows):
        chosen = ordered[start : start + rows]
        input_ids = torch.zeros(len(chosen), len(chosen[-1]), dtype=torch.long)
        is_target = torch.zeros_like(input_ids, dtype=torch.bool)
        for row, example in enumerate(chosen):
            input_ids[row, : len(example)] = torch.tensor(example.token_ids)
            is_target[row, example.num_prompt_tokens : len(example)] = True
        places = is_target.flatten().nonzero().squeeze(1)
        # A prompt is never empty, so that the place before a target is in the same row.
        yield MicroBatch(input_ids, places - 1, input_ids.flatten()[places])
