"""The ``reward_model`` oracle: a sequence classifier with one output, run by transformers.

Shapes: ``B`` conversations of a batch, ``T`` tokens of the longest.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from stages.contract.errors import UserError
from stages.contract.messages import Messages
from stages.contract.number_types import NumberType
from stages.harness.context import ModelSource, StageContext
from stages.modeling.chat import (
    render_conversation,
    require_chat_template,
    spelled_control_tokens,
)
from stages.modeling.load import context_tokens, load_model, load_model_config
from stages.modeling.probe import require_static_rope
from stages.modeling.token_batches import token_batches
from stages.modeling.tokenizers import load_tokenizer, require_vocabulary
from stages.score.oracle import OracleVerdict
from stages.score.params import ScoreParams

Conversations = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Classifier:
    """A loaded reward model, called with one batch of conversations."""

    model: Any
    pad_id: int | None
    """The padding id that the checkpoint names, if any."""
    read: Callable[[Any], list[OracleVerdict]]
    """The model's output for a batch to one verdict per conversation."""

    @torch.inference_mode()
    def __call__(self, conversations: Conversations) -> list[OracleVerdict]:
        """Verdicts on conversations, padded to one [B, T] batch on the right."""
        pad_id = self._pad_id(conversations)
        rows = [torch.tensor(conversation) for conversation in conversations]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        device = self.model.device
        return self.read(self.model(input_ids=ids.to(device), attention_mask=mask.to(device)))

    def _pad_id(self, conversations: Conversations) -> int:
        """The model's padding id, or one that ends no conversation.

        Decoder classifiers read the reward at the last token that is not padding: a conversation
        that ends with the padding id would be read too early. Without a padding id transformers
        reads it at the last position and takes one conversation at a time.
        """
        config = self.model.config.get_text_config()
        used = {token_ids[-1] for token_ids in conversations}
        named = range(0) if self.pad_id is None else [self.pad_id]
        free = (
            token_id for token_id in (*named, *range(config.vocab_size)) if token_id not in used
        )
        config.pad_token_id = next(free)
        return config.pad_token_id


@dataclass(frozen=True)
class RewardModel:
    """Scores the whole conversation: the prompt's messages and the response as assistant turn.

    The tokenizer's chat template renders it. A conversation that is longer than
    ``max_length_tokens`` or spells control tokens has no score.
    """

    classifier: Callable[[Conversations], list[OracleVerdict]]
    config: Any
    tokenizer: Any
    identity: str
    max_length_tokens: int
    tokens_per_batch: int
    """Tokens of one forward pass, padding included."""
    opens_with_bos: bool = False
    allow_control_tokens: bool = False

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        conversations = []
        fitting = []
        for index, row in enumerate(rows):
            messages = [*row["messages"], {"role": "assistant", "content": row["response"]}]
            try:
                conversations.append(render_conversation(self.tokenizer, messages))
                reason = self._unreadable(messages, conversations[-1])
            except UserError as error:
                place = f"prompt {row['prompt_id']}, sample {row['sample_index']}"
                raise error.at(place) from error
            if reason is None:
                fitting.append(index)
            else:
                yield index, OracleVerdict(None, reason)
        lengths = [len(conversations[index]) for index in fitting]
        require_static_rope(
            self.config,
            self.config.name_or_path,
            longest=max(lengths, default=0),
            remedy="set the reward model's max_length_tokens={limit}, so that longer conversations "
            "get no score",
        )
        for batch in token_batches(lengths, self.tokens_per_batch):
            chosen = [fitting[place] for place in batch]
            verdicts = self.classifier([conversations[index] for index in chosen])
            yield from zip(chosen, verdicts, strict=True)

    def _unreadable(self, messages: Messages, token_ids: Sequence[int]) -> str | None:
        """Reason why a conversation cannot be scored; None if it can."""
        if len(token_ids) > self.max_length_tokens:
            return f"{len(token_ids)} tokens, the reward model reads {self.max_length_tokens}"
        if self.opens_with_bos and token_ids[:1] != [self.tokenizer.bos_token_id]:
            raise UserError(
                f"a conversation does not open with the BOS token "
                f"({self.tokenizer.bos_token!r}) that the reward model expects",
                "correct the tokenizer's chat template, or use the checkpoint's own tokenizer",
            )
        if self.allow_control_tokens:
            return None
        return spelled_control_tokens(self.tokenizer, messages)


def load(ctx: StageContext[ScoreParams]) -> RewardModel:
    """Loads the reward model given as input ``model``."""
    dtype = ctx.params.reward_model.dtype
    return load_reward_model(ctx, partial(load_classifier, ctx.model("model"), dtype))


def load_reward_model(
    ctx: StageContext[ScoreParams],
    load_weights: Callable[[], Classifier],
    *,
    opens_with_bos: bool = False,
) -> RewardModel:
    """Loads the checkpoint given as input ``model``, its weights last: they take longest."""
    settings = ctx.params.reward_model
    source = ctx.model("model")
    tokenizer = load_tokenizer(source)
    require_chat_template(tokenizer, source.name_or_path)
    config = load_model_config(source)
    require_vocabulary(tokenizer, config, source)
    limit = context_tokens(config, settings.max_length_tokens, source)
    return RewardModel(
        classifier=load_weights(),
        config=config,
        tokenizer=tokenizer,
        identity=f"{ctx.params.oracle}:{ctx.inputs['model'][0].source.digest[:80]}",
        max_length_tokens=limit,
        tokens_per_batch=settings.tokens_per_batch,
        opens_with_bos=opens_with_bos,
        allow_control_tokens=ctx.params.allow_control_tokens,
    )


def load_classifier(source: ModelSource, dtype: NumberType) -> Classifier:
    """Loads a sequence classifier; refuses one with several outputs."""
    model = load_model(AutoModelForSequenceClassification, source, dtype=dtype)
    num_outputs = model.config.num_labels
    if num_outputs != 1:
        raise UserError(
            f"the reward model {source.name_or_path} has {num_outputs} outputs, not one",
            "use a classifier with num_labels=1 (a URM checkpoint: the oracle urm_gated or "
            "urm_helpfulness); the checkpoint does not say which output is the reward",
        )
    _widen_head(model)
    return Classifier(model, model.config.get_text_config().pad_token_id, _read_first_logit)


def _widen_head(model: Any) -> None:
    """Has the head compute in float32: in 16 bits unlike answers get equal rewards."""
    for name, head in model.named_children():
        if name != model.base_model_prefix:
            head.float().register_forward_pre_hook(
                lambda module, states: tuple(state.float() for state in states)
            )


def _read_first_logit(output: Any) -> list[OracleVerdict]:
    return [
        OracleVerdict(reward)
        if math.isfinite(reward)
        else OracleVerdict(None, f"the reward model gave {reward}")
        for reward in output.logits[:, 0].float().tolist()
    ]
