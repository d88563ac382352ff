"""Tokenizer, stop ids and context of the policy's checkpoint; its weights are the backends'."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.contract.digests import derive_seed
from stages.contract.errors import located
from stages.generate.backend import EncodedPrompt
from stages.generate.params import GenerateParams
from stages.harness.context import ModelSource
from stages.modeling.chat import load_chat_tokenizer, render_prompt
from stages.modeling.load import context_tokens, load_model_config
from stages.modeling.probe import require_static_rope
from stages.modeling.tokenizers import require_embedded


@dataclass(frozen=True)
class Policy:
    """A policy's tokenizer, which has a chat template, and its limits."""

    source: ModelSource
    tokenizer: Any
    stop_ids: frozenset[int]
    """Token ids that end a response."""
    max_length_tokens: int
    """Most tokens of prompt and response together."""
    vocab_size: int
    """Token ids that the weights know."""
    is_tied: bool = True
    """True if the head's weights are the input embeddings."""

    def render(
        self, row: Mapping[str, Any], params: GenerateParams, seed: int
    ) -> EncodedPrompt | None:
        """The prompt of a row of the prompts table, or None if it is too long for the context."""
        with located(f"prompt {row['prompt_id']}"):
            token_ids = render_prompt(self.tokenizer, row["messages"], params)
            require_embedded(max(token_ids), self.vocab_size, self.source)
        if len(token_ids) + params.max_new_tokens > self.max_length_tokens:
            return None
        seeds = [
            derive_seed(seed, row["prompt_id"], sample) for sample in range(params.num_samples)
        ]
        return EncodedPrompt(token_ids, seeds)

    def decode(self, token_ids: list[int]) -> str:
        """The text of a response, without its stop token and other special tokens."""
        if token_ids and token_ids[-1] in self.stop_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def load_policy(source: ModelSource, params: GenerateParams) -> Policy:
    """Reads a checkpoint's tokenizer and configuration; UserError if they cannot serve."""
    tokenizer = load_chat_tokenizer(source)
    config = load_model_config(source)
    limit = context_tokens(config, params.max_length_tokens, source)
    if params.backend == "vllm":
        # Its engine takes the frequencies of its longest sequence for all.
        require_static_rope(
            config,
            source.name_or_path,
            longest=limit,
            remedy="set generate.max_length_tokens={limit}",
        )
    stop_ids = end_token_ids(tokenizer, config, source) | set(params.stop_token_ids)
    vocabulary = config.get_text_config().vocab_size
    with located("generate.stop_token_ids"):
        require_embedded(max(params.stop_token_ids, default=0), vocabulary, source)
    return Policy(
        source,
        tokenizer,
        frozenset(stop_ids),
        limit,
        vocabulary,
        is_tied=bool(config.tie_word_embeddings),
    )


def end_token_ids(tokenizer: Any, config: Any, source: ModelSource) -> set[int]:
    """End-of-sequence ids by tokenizer, model configuration and generation configuration.

    Chat models end a turn with an id that often only one of the three knows (Llama 3's
    ``<|eot_id|>``).
    """
    end_ids: set[int] = set()
    for holder in (tokenizer, config, _generation_config(source)):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            end_ids |= {ids} if isinstance(ids, int) else set(ids)
    return end_ids


def _generation_config(source: ModelSource) -> Any:
    """The checkpoint's generation configuration; None if it has none."""
    from huggingface_hub import constants
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source.name_or_path, revision=source.revision)
    except OSError as error:
        # The same class for a file that is not there, then without a cause, and for a hub that
        # does not answer: without its ids responses would run on past their end.
        if error.__cause__ is None or constants.HF_HUB_OFFLINE:
            return None
        message = " ".join(str(error).split())
        raise OSError(
            f"the hub does not say whether {source.name_or_path} has a generation configuration, "
            f"which may end its responses: {message}"
        ) from error
