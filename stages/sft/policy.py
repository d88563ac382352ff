"""Tokenizer and model before training: from scratch, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from stages.contract.context import ModelSource
from stages.modeling.chat import require_chat_template
from stages.modeling.load import DTYPES
from stages.modeling.tokenizers import load_tokenizer
from stages.sft.params import ArchitectureParams
from stages.sft.tokenizer import make_word_tokenizer
from stages.training.numerics import Numerics


def starting_tokenizer(
    source: ModelSource | None, architecture: ArchitectureParams, texts: Iterable[str]
) -> Any:
    """The checkpoint's tokenizer, or without one a tokenizer for the words of ``texts``.

    Raises:
        UserError: The checkpoint has no tokenizer, or no chat template.
    """
    if source is None:
        return make_word_tokenizer(texts, max_length=architecture.max_position_embeddings)
    tokenizer = load_tokenizer(source)
    require_chat_template(tokenizer, source.name_or_path)
    return tokenizer


def new_model(
    architecture: ArchitectureParams, tokenizer: Any, seed: int, numerics: Numerics
) -> Any:
    """Makes a Llama with random weights, the same in every process."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), **architecture.model_dump(), **special)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model.to(device=numerics.device, dtype=DTYPES[numerics.weights]).eval()
