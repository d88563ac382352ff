"""Conversations of JSONL and Parquet files, a word-level tokenizer for them, and their tokens."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.contract.errors import UserError, located
from stages.contract.messages import ROLES, Messages
from stages.harness.context import FoundInput
from stages.modeling.chat import render_answered
from stages.modeling.sources import open_source
from stages.sft.params import SftParams
from stages.sft.rows import read_conversation
from stages.training.batches import Example

Placed = tuple[str, Messages]
"""A conversation after its place (``sft.jsonl, line 3``)."""


def read_conversations(inputs: Iterable[FoundInput]) -> Iterator[Placed]:
    """Yields the conversations of several inputs in order; each ends with an assistant turn.

    Raises:
        UserError: One has no conversation or cannot be read, or a row is not such a conversation.
            The message names it.
    """
    for data in inputs:
        source = open_source(data)
        place = ""
        for place, row in source.read():
            with located(place):
                conversation = read_conversation(row)
            yield place, conversation
        if not place:
            raise UserError(f"{source.name} has no conversations", "check that it is the right one")


PAD = "<pad>"
BOS = "<s>"
EOS = "</s>"
UNKNOWN = "<unk>"
# Words and marks keep the space before them, so that decoding gives the text back as it was.
_PIECES = r" ?\w+| ?[^\w\s]|\s"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_word_tokenizer(texts: Iterable[str], *, max_length: int) -> Any:
    """Makes a tokenizer with one token for each word, number or mark of ``texts``.

    Decoding the ids of a text that has only known words gives the text back, spaces included.

    Args:
        texts: Everything that the policy should be able to read and say.
        max_length: Context of the model, in tokens.

    Returns:
        A fast tokenizer of transformers, with a chat template that writes the BOS itself.
    """
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    special = [PAD, BOS, EOS, UNKNOWN, *(f"<|{role}|>" for role in ROLES)]
    words = [*special, *sorted(pieces - set(special))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_example(tokenizer: Any, conversation: Messages, params: SftParams) -> Example:
    """Renders a conversation; the prompt has exactly the ids that sampling will start from.

    Errors are as in :func:`stages.modeling.chat.render_answered`.
    """
    *prompt, answer = conversation
    parts = render_answered(tokenizer, prompt, answer["content"], params)
    return Example(*(np.array(part, np.int32) for part in parts))


def make_examples(
    tokenizer: Any, conversations: Iterable[Placed], params: SftParams, max_length: int
) -> tuple[list[Example], int]:
    """Renders conversations of at most ``max_length`` tokens, and counts the others."""
    examples = []
    num_dropped = 0
    for place, conversation in conversations:
        with located(place):
            example = make_example(tokenizer, conversation, params)
        if example.row_tokens <= max_length:
            examples.append(example)
        else:
            num_dropped += 1
    if not examples:
        raise UserError(
            f"all {num_dropped} conversations are longer than {max_length} tokens",
            "raise sft.max_length_tokens",
        )
    return examples, num_dropped
