"""Conversations for reward models: the prompt's messages and the response as assistant turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.contract.errors import UserError
from stages.modeling.chat import render_conversation


def render_row(tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """Token ids of a row's whole conversation.

    Raises:
        UserError: The chat template refuses it, or doubles the BOS token.
    """
    messages = [*row["messages"], {"role": "assistant", "content": row["response"]}]
    try:
        return render_conversation(tokenizer, messages)
    except UserError as error:
        raise error.at(f"prompt {row['prompt_id']}, sample {row['sample_index']}") from error


def too_long(token_ids: Sequence[int], limit: int) -> str | None:
    """Reason why a conversation of so many tokens gets no score; None if it does."""
    if len(token_ids) > limit:
        return f"{len(token_ids)} tokens, the reward model reads {limit}"
    return None
