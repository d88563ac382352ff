"""A word-level tokenizer made from the data, for policies that start from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
ROLES = ("system", "user", "assistant")

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
    model = models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)
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
