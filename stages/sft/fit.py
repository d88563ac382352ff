"""Training on conversations, from data files to a warm-started policy."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from stages.contract.digests import derive_seed
from stages.harness.context import StageContext
from stages.modeling.chat import load_chat_tokenizer
from stages.modeling.load import context_tokens, load_model_config
from stages.modeling.logprobs import ResponseLogprobs
from stages.sft.data import (
    Placed,
    make_examples,
    make_word_tokenizer,
    read_conversations,
)
from stages.sft.params import ArchitectureParams, SftParams
from stages.training.batches import Example
from stages.training.engine import Engine, Process
from stages.training.fit import Fit
from stages.training.loop import Objective
from stages.training.policy import load_logprob_model, logprob_model


def new_model(
    architecture: ArchitectureParams, tokenizer: Any, seed: int, device: torch.device
) -> Any:
    """Makes a Llama with random float32 weights, the same in every process."""
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), **architecture.model_dump(), **special)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**special)
    return model.to(device=device, dtype=torch.float32).eval()


class AnswerLikelihood(Objective[Example]):
    """The mean negative log-likelihood of a global batch's answer tokens."""

    num_sums = 0

    def __init__(self, engine: Engine, learning_rate: float) -> None:
        self._engine = engine
        self.remedy = f"lower sft.learning_rate ({learning_rate:g})"

    def micro_loss(self, samples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood, and no sums."""
        logprobs = self._engine.logprobs(self._engine.rows(samples))
        return -logprobs.sum(), logprobs.new_empty(self.num_sums, dtype=torch.float64)


class ConversationFit(Fit[SftParams]):
    """Training of `policy`, or of a new model, on `data`."""

    def __init__(self, ctx: StageContext[SftParams], process: Process) -> None:
        super().__init__(ctx, process)
        self._source = ctx.model("policy") if ctx.has("policy") else None
        conversations: Iterable[Placed] = read_conversations(ctx.inputs["data"])
        longest = ctx.params.max_length_tokens
        if self._source is None:
            # Their words are the new model's vocabulary.
            conversations = list(conversations)
            texts = [turn["content"] for _, turns in conversations for turn in turns]
            context = ctx.params.architecture.max_position_embeddings
            self.tokenizer = make_word_tokenizer(texts, max_length=context)
            longest = min(longest or context, context)
        else:
            self.tokenizer = load_chat_tokenizer(self._source)
            config = load_model_config(self._source)
            has_limit = getattr(config.get_text_config(), "max_position_embeddings", None)
            if longest is None and not has_limit:
                # A recurrent model has none.
                longest = sys.maxsize
            longest = context_tokens(config, longest, self._source)
        examples, num_dropped = make_examples(self.tokenizer, conversations, ctx.params, longest)
        if num_dropped:
            process.events.warning(
                f"{num_dropped} of {num_dropped + len(examples)} conversations "
                f"are longer than {longest} tokens and are left out"
            )
        sources = filter(None, [self._source])
        self.set_plan(examples, ctx.params.global_batch_rows, sources)

    def load_model(self) -> ResponseLogprobs:
        """The checkpoint, or a model from scratch."""
        params = self.ctx.params
        if self._source is not None:
            return load_logprob_model(self._source, params, self.numerics)
        seed = derive_seed(self.ctx.request.seed, "weights")
        device = self.numerics.device
        model = new_model(params.architecture, self.tokenizer, seed, device)
        return logprob_model(model, params, self.numerics)

    def make_objective(self, engine: Engine) -> AnswerLikelihood:
        """The likelihood of answers."""
        return AnswerLikelihood(engine, self.ctx.params.learning_rate)


FIT = ConversationFit
