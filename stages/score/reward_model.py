"""The ``reward_model`` oracle: a sequence classifier with one output, run by transformers.

Shapes: ``B`` conversations of a batch, ``T`` tokens of the longest.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification

from stages.contract.errors import UserError, located
from stages.contract.messages import Messages
from stages.contract.number_types import NumberType
from stages.harness.context import ModelSource, StageContext
from stages.modeling.chat import (
    load_chat_tokenizer,
    render_conversation,
    spelled_control_tokens,
)
from stages.modeling.load import context_tokens, load_model, load_model_config
from stages.modeling.probe import require_static_rope
from stages.modeling.token_batches import token_batches
from stages.modeling.tokenizers import require_embedded
from stages.score.oracle import OracleVerdict
from stages.score.params import ScoreParams


@dataclass(frozen=True)
class RewardModel:
    """Scores the whole conversation: the prompt's messages and the response as assistant turn.

    The tokenizer's chat template renders it. A conversation that is longer than
    ``max_length_tokens`` or spells control tokens has no score.
    """

    model: Any
    source: ModelSource
    read: Callable[[Any], list[OracleVerdict]]
    """The model's output for a batch to one verdict per conversation."""
    tokenizer: Any
    identity: str
    max_length_tokens: int
    tokens_per_batch: int
    """Tokens of one forward pass, padding included."""
    allow_control_tokens: bool = False

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        config = self.model.config.get_text_config()
        conversations = []
        fitting = []
        for index, row in enumerate(rows):
            messages = [*row["messages"], {"role": "assistant", "content": row["response"]}]
            with located(f"prompt {row['prompt_id']}, sample {row['sample_index']}"):
                token_ids = render_conversation(self.tokenizer, messages)
                require_embedded(max(token_ids), config.vocab_size, self.source)
                conversations.append(token_ids)
                reason = self._unreadable(messages, token_ids)
            if reason is None:
                fitting.append(index)
            else:
                yield index, OracleVerdict(None, reason)
        lengths = [len(conversations[index]) for index in fitting]
        require_static_rope(
            self.model.config,
            self.model.config.name_or_path,
            longest=max(lengths, default=0),
            remedy="set the reward model's max_length_tokens={limit}, so that longer conversations "
            "get no score",
        )
        for batch in token_batches(lengths, self.tokens_per_batch):
            chosen = [fitting[place] for place in batch]
            verdicts = self._classify([conversations[index] for index in chosen])
            yield from zip(chosen, verdicts, strict=True)

    def _unreadable(self, messages: Messages, token_ids: Sequence[int]) -> str | None:
        """Reason why a conversation cannot be scored; None if it can."""
        if len(token_ids) > self.max_length_tokens:
            return f"{len(token_ids)} tokens, the reward model reads {self.max_length_tokens}"
        if self.allow_control_tokens:
            return None
        return spelled_control_tokens(self.tokenizer, messages)

    @torch.inference_mode()
    def _classify(self, conversations: Sequence[Sequence[int]]) -> list[OracleVerdict]:
        """Verdicts on conversations, padded to one [B, T] batch on the right.

        Decoder classifiers read the reward at the last token that is not padding: an id pads that
        ends no conversation. Without one transformers takes one conversation at a time.
        """
        config = self.model.config.get_text_config()
        used = {token_ids[-1] for token_ids in conversations}
        pad_id = next(number for number in range(config.vocab_size) if number not in used)
        config.pad_token_id = pad_id
        rows = [torch.tensor(conversation) for conversation in conversations]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad_id)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        device = self.model.device
        output = self.model(input_ids=ids.to(device), attention_mask=mask.to(device))
        return self.read(output)


def load(ctx: StageContext[ScoreParams]) -> RewardModel:
    """Loads the reward model given as input ``model``."""
    return load_reward_model(
        ctx,
        load_classifier,
        lambda output: [finite_verdict(reward) for reward in output.logits[:, 0].float().tolist()],
    )


def load_reward_model(
    ctx: StageContext[ScoreParams],
    load_weights: Callable[[ModelSource, NumberType], Any],
    read: Callable[[Any], list[OracleVerdict]],
) -> RewardModel:
    """Loads the checkpoint given as input ``model``, its weights last: they take longest."""
    settings = ctx.params.reward_model
    source = ctx.model("model")
    tokenizer = load_chat_tokenizer(source)
    config = load_model_config(source)
    limit = context_tokens(config, settings.max_length_tokens, source)
    return RewardModel(
        model=load_weights(source, settings.dtype),
        source=source,
        read=read,
        tokenizer=tokenizer,
        identity=f"{ctx.params.oracle}:{ctx.request.inputs['model'][0].digest[:80]}",
        max_length_tokens=limit,
        tokens_per_batch=settings.tokens_per_batch,
        allow_control_tokens=ctx.params.allow_control_tokens,
    )


def load_classifier(source: ModelSource, dtype: NumberType) -> Any:
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
    return model


def _widen_head(model: Any) -> None:
    """Has the head compute in float32: in 16 bits unlike answers get equal rewards."""
    for name, head in model.named_children():
        if name != model.base_model_prefix:
            head.float().register_forward_pre_hook(
                lambda module, states: tuple(state.float() for state in states)
            )


def finite_verdict(score: float, components: Mapping[str, float] = {}) -> OracleVerdict:
    """The verdict of these numbers, which has no score if one of them is not finite."""
    if all(map(math.isfinite, (score, *components.values()))):
        return OracleVerdict(score, components=components)
    return OracleVerdict(None, f"the reward model gave {score} {components or ''}".rstrip())
