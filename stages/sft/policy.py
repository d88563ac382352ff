"""The policy before training: from scratch, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from stages.contract.context import ModelSource
from stages.contract.errors import UserError
from stages.modeling.chat import require_chat_template
from stages.modeling.load import default_device, load_causal_lm, load_config, load_tokenizer
from stages.modeling.probe import UnfitModelError, check_logprobs
from stages.sft.params import ArchitectureParams
from stages.sft.tokenizer import make_word_tokenizer


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer.

    Attributes:
        model: Causal language model with float32 weights, on its device.
        tokenizer: Its tokenizer, with a chat template.
        dtype: Type of the weights where it came from.
    """

    model: Any
    tokenizer: Any
    dtype: torch.dtype


def load_policy(source: ModelSource) -> Policy:
    """Loads a checkpoint.

    Raises:
        UserError: It cannot be loaded, has no tokenizer or chat template, or no plain linear head.
    """
    tokenizer = load_tokenizer(source)
    require_chat_template(tokenizer, source.name_or_path)
    model = load_causal_lm(source, dtype="float32")
    try:
        check_logprobs(model)
    except UnfitModelError as error:
        raise UserError(
            f"log-probabilities of {source.name_or_path} cannot be computed: {error}",
            "use a model of the Llama, Mistral or Qwen families",
        ) from error
    return Policy(model, tokenizer, load_config(source).dtype or torch.float32)


def new_policy(architecture: ArchitectureParams, texts: Iterable[str], seed: int) -> Policy:
    """Makes a Llama with random weights and a tokenizer for the words of ``texts``."""
    context = architecture.max_position_embeddings
    tokenizer = make_word_tokenizer(texts, max_length=context)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), **architecture.model_dump(), **special)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return Policy(model.to(default_device()), tokenizer, torch.float32)
