"""Models and pairs of the training benchmark: made up, or a run's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stages.contract.digests import prompt_id
from stages.tables.schemas import PAIRS, read_rows, write_table

EOS = 0
BATCH_PAIRS = 4
MEDIAN_PROMPT = 135
MEDIAN_RESPONSE = 160
SPREAD = 0.5
LONGEST_PROMPT = 500
LONGEST_RESPONSE = 700


@dataclass(frozen=True)
class Shape:
    """A model and how much it is trained on.

    Attributes:
        vocabulary: Tokens.
        width: Width of the hidden states.
        inner: Width inside the MLP.
        layers: Decoder layers.
        heads: Attention heads.
        key_heads: Heads of keys and values.
        tied: The head's weight is the embedding's.
        pairs: Preference pairs, in batches of :data:`BATCH_PAIRS`.
        tokens_at_once: Token budget of our micro-batches.
        dtype: Type of the saved weights.
    """

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    tied: bool
    pairs: int
    tokens_at_once: int
    dtype: str = "float32"


SHAPES = {
    "head-heavy": Shape(32_000, 256, 680, 6, 4, 4, True, 32, 2048),
    "layer-heavy": Shape(8_000, 512, 1288, 8, 8, 8, True, 16, 1024),
    "llama-8b": Shape(128_256, 4096, 14_336, 32, 32, 8, False, 32, 16_384, "bfloat16"),
    "llama-1b": Shape(128_256, 2048, 8192, 16, 32, 8, True, 32, 16_384, "bfloat16"),
}


def make_model(shape: Shape, folder: Path) -> None:
    """Writes a Llama of random weights, and a tokenizer of one token per word."""
    words = {"</s>": EOS} | {f"w{index}": index for index in range(1, shape.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    random_model(shape).save_pretrained(folder)


def random_model(shape: Shape) -> LlamaForCausalLM:
    """A Llama of random weights on the GPU, or on the CPU if there is none."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
        dtype=shape.dtype,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(getattr(torch, shape.dtype))
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def make_pairs(shape: Shape, path: Path, *, num_pairs: int, scale: float) -> list[dict[str, Any]]:
    """Writes a PAIRS table of log-normal lengths and returns its rows.

    Args:
        shape: Gives the vocabulary.
        path: The table.
        num_pairs: Rows.
        scale: Factor on all lengths.
    """
    draw = np.random.default_rng(0)

    def length(median: int, longest: int) -> int:
        drawn = median * scale * np.exp(SPREAD * draw.standard_normal())
        return int(np.clip(drawn, 8, longest * scale))

    def tokens(count: int) -> list[int]:
        return draw.integers(1, shape.vocabulary, count).tolist()

    def row(index: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"prompt {index}"}]
        fields: dict[str, Any] = {
            "prompt_id": prompt_id(messages),
            "prompt": messages,
            "prompt_token_ids": tokens(length(MEDIAN_PROMPT, LONGEST_PROMPT)),
            "tie": False,
        }
        for side, score in (("chosen", 1.0), ("rejected", 0.0)):
            ids = [*tokens(length(MEDIAN_RESPONSE, LONGEST_RESPONSE)), EOS]
            fields |= {
                f"{side}_sample_index": int(side == "rejected"),
                f"{side}_token_ids": ids,
                f"{side}_logprobs": [math.nan] * len(ids),
                side: [{"role": "assistant", "content": ""}],
                f"{side}_finish_reason": "stop",
                f"{side}_score": score,
            }
        return fields

    rows = [row(index) for index in range(num_pairs)]
    write_table(path, PAIRS, rows)
    return rows


def take_pairs(source: Path, model: Path, path: Path, *, num_pairs: int) -> list[dict[str, Any]]:
    """Writes the first pairs of a run's PAIRS table that TRL reads alike, and returns them.

    TRL takes text, cuts it into tokens again, and ends each response with the end of a turn: pairs
    whose tokens come out otherwise, and those whose responses were cut off, are left out.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def same(row: dict[str, Any], side: str) -> bool:
        prompt = row["prompt_token_ids"]
        response = row[f"{side}_token_ids"]
        written = tokenizer.decode(prompt) + tokenizer.decode(response[:-1])
        read = [*tokenizer(written)["input_ids"], tokenizer.eos_token_id]
        return bool(read == [*prompt, *response])

    rows = [row for row in read_rows(source, PAIRS) if not row["tie"]]
    rows = [row for row in rows if same(row, "chosen") and same(row, "rejected")][:num_pairs]
    if len(rows) < num_pairs:
        raise ValueError(f"{source} has {len(rows)} such pairs, fewer than {num_pairs}: --pairs")
    write_table(path, PAIRS, rows)
    return rows
